"""A soak: thousands of iterations of a tiny model while 5 % of all steps of its environments fail, in every way.

    python benchmarks/soak.py --minutes 8     # a piece of the run; again and again, until there are 2,000 iterations
    python benchmarks/soak.py --minutes 60 --iterations 4000   # in one piece, so that the memory can be judged
    python benchmarks/soak.py --minutes 0     # what there is so far

Half of the environments are threads, half are processes with a time limit of 1 s. Which
step fails, and how, follows from the seed of its episode. A piece of the run ends after its minutes, with a checkpoint,
and the next one continues there; so it also does when a piece is killed.

What is checked: each iteration has all of its turns, each turn is there once, the turns of an environment follow each
other, and the episodes that break off are as many as the faults that are counted. What is told besides: the longest
iteration, and how fast the memory of the trainer grows. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmarks.soak_game  # noqa: F401 - registers the game
from benchmarks.intervals import T_QUANTILES
from lightning_agentrl.agents import Optim, PPOAgent
from lightning_agentrl.callbacks import TurnLog
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from tests.tiny import tiny_model_folder

ENVS, TURNS = 4, 4  # of an iteration, turns of each environment
BURN_IN, BLOCK = 1500, 20  # iterations of a piece until all caches are full, and over which is averaged
Turn = dict[str, Any]  # a line of the turn log


class Diary(L.Callback):
    """A line for each iteration, and the end of a piece.

    Args:
        file: of lines.
        seconds: of the piece.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.ends_at = file, time.monotonic() + seconds
        self.piece = int(time.time())
        self.began_at = time.monotonic()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began_at = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if time.monotonic() > self.ends_at:
            trainer.should_stop = True
        seconds, pages = time.monotonic() - self.began_at, int(Path("/proc/self/statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        line = {"piece": self.piece, "iteration": trainer.current_epoch + 1, "seconds": seconds, "mb": megabytes}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def play(folder: Path, iterations: int, minutes: float) -> None:
    """Continue the run for some minutes."""
    for name in ("marks", "model"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    model = tiny_model_folder(folder / "model")
    marks = str(folder / "marks")
    game = "benchmarks.soak_game:Faulty-v0"
    limits: dict[str, Any] = {"worker": "process", "timeout_seconds": 1.0}
    data = RolloutDataModule(
        envs=[
            EnvConfig(game, {"folder": marks}, retries=1),
            EnvConfig(game, {"folder": marks, "alone": True}, retries=1, **limits),
        ],
        num_envs=ENVS,
        turns_per_env=TURNS,
        mini_batch_turns=ENVS * TURNS // 2,
        memory=WindowMemory(1),
        prompt=PromptFormat(think=False, max_prompt_tokens=512),
        interaction=TurnInteraction(max_reply_tokens=4, ask_again=1),
        validation=ValidationConfig(episodes=0),
        faults=FaultLimits(in_a_row=50, share=1.0),
        seed=0,
    )
    last = folder / "last.ckpt"
    checkpoint = ModelCheckpoint(folder, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=iterations,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[
            Diary(folder / "iterations.jsonl", 60 * minutes),
            TurnLog(str(folder / "turns"), keep_files=10_000),
            checkpoint,
        ],
    )
    agent = PPOAgent(str(model), critic=SharedCritic(), optim=Optim(lr_actor=1e-5, lr_critic=1e-4))
    trainer.fit(agent, data, ckpt_path=str(last) if last.exists() else None)


def turns_of(folder: Path) -> Iterator[Turn]:
    """Yield the turns in the order of the run. Of an iteration that a killed piece had begun, the last time counts."""
    written: dict[int, tuple[Path, list[Turn]]] = {}
    for file in sorted((folder / "turns").glob("rank0-*.jsonl")):
        for line in file.open(encoding="utf-8"):
            turn = json.loads(line)
            of, turns = written.setdefault(turn["iteration"], (file, []))
            if of != file:  # begun anew by a later piece, or the log went on in another file as this one was full
                turns = [] if _id(turn) in map(_id, turns) else turns
                written[turn["iteration"]] = (file, turns)
            turns.append(turn)
    for iteration in sorted(written):
        yield from written[iteration][1]


def _id(turn: Turn) -> tuple[int, int, int]:
    return turn["env"], turn["episode"], turn["turn"]


def check_ledger(turns: Sequence[Turn]) -> list[str]:
    """Return what does not add up."""
    troubles = []
    per_iteration = Counter(turn["iteration"] for turn in turns)
    if sorted(per_iteration) != list(range(1, len(per_iteration) + 1)):
        troubles.append("an iteration is missing")
    troubles += [f"iteration {i} has {n} turns" for i, n in per_iteration.items() if n != ENVS * TURNS]
    ids = Counter(map(_id, turns))
    troubles += [f"environment {e}, episode {n}, turn {i} is there {k} times" for (e, n, i), k in ids.items() if k > 1]
    for env in range(ENVS):
        broken, before = 0, {"episode": -1, "turn": 0, "stop": "begin"}
        own = [turn for turn in turns if turn["env"] == env]
        for turn in own:
            if turn["episode"] == before["episode"]:
                if turn["turn"] != before["turn"] + 1 or before["stop"] is not None:
                    troubles.append(f"environment {env}: turn {turn['turn']} of {turn['episode']} follows {before}")
            else:
                if turn["turn"] or turn["episode"] < before["episode"]:
                    troubles.append(f"environment {env}: episode {turn['episode']} begins with turn {turn['turn']}")
                broken += turn["episode"] - before["episode"] - 1 + (before["stop"] is None)
            broken += turn["stop"] == "env_fault"
            before = turn
        counted = sum(len(turn["lost"]) for turn in own)
        if counted != broken:
            troubles.append(f"environment {env}: {broken} episodes broke off, and {counted} are counted")
    return troubles


def growth(lines: Sequence[dict[str, float]]) -> tuple[float, float, int] | None:
    """Return the growth of memory in kB per iteration, half the width of its 95 % interval, and the blocks compared.

    The memory is averaged over blocks of iterations; what counts are the differences of neighbouring blocks of a piece.
    """
    steps = []
    for piece in dict.fromkeys(line["piece"] for line in lines):
        mb = [line["mb"] for line in lines if line["piece"] == piece][BURN_IN:]
        blocks = [statistics.mean(mb[i : i + BLOCK]) for i in range(0, len(mb) - BLOCK + 1, BLOCK)]
        steps += [1000 * (after - before) / BLOCK for before, after in itertools.pairwise(blocks)]
    if len(steps) < 2:
        return None
    quantile = T_QUANTILES[min(len(steps) - 1, len(T_QUANTILES)) - 1]
    return statistics.mean(steps), quantile * statistics.stdev(steps) / math.sqrt(len(steps)), len(steps) + 1


def report(folder: Path) -> bool:
    """Print what there is; return whether all checks hold."""
    turns = list(turns_of(folder))
    lines = [json.loads(line) for line in (folder / "iterations.jsonl").open()]
    troubles = check_ledger(turns)
    overcome = Counter(kind for turn in turns for kind in turn["env_errors"])
    lost = Counter(kind for turn in turns for kind in turn["lost"])
    stops = Counter(turn["stop"] for turn in turns if turn["stop"])
    seconds = [line["seconds"] for line in lines]
    print(f"iterations: {turns[-1]['iteration']} in {len({line['piece'] for line in lines})} pieces")
    typical, longest = statistics.median(seconds), max(seconds)
    print(f"minutes: {sum(seconds) / 60:.1f}; an iteration takes {typical:.2f} s, at most {longest:.1f} s")
    print(f"turns: {len(turns)}, asked again {sum(turn['asked_again'] for turn in turns)}; ends: {dict(stops)}")
    print(f"errors that a retry overcame: {overcome.total()} {dict(overcome)}")
    print(f"episodes lost: {lost.total()} {dict(lost)}")
    if (grown := growth(lines)) is None:
        print("memory: too few iterations to tell")
    else:
        slope, half, blocks = grown
        print(f"memory: {lines[-1]['mb']:.0f} MB; grows by {slope:.1f} +- {half:.1f} kB an iteration ({blocks} blocks)")
    print("\n".join(troubles) or "ledger: every turn is there once, and every episode that broke off is counted")
    return not troubles


def main() -> None:
    parser = argparse.ArgumentParser(description="Thousands of iterations beside faulty environments.")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--iterations", type=int, default=2000, help="of the whole run")
    parser.add_argument("--minutes", type=float, default=8, help="of this piece; 0: only report")
    given = parser.parse_args()
    disable_progress_bar()
    if given.minutes:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(its episode is lost|trying again)$")
            play(given.folder, given.iterations, given.minutes)
    sys.exit(0 if report(given.folder) else 1)


if __name__ == "__main__":
    main()
