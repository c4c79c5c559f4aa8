"""Tokens, memory and CPU time of long episodes of Crafter: prompts with a window of the past against growing samples.

    .venv/bin/python benchmarks/crafter_memory.py              # 4 environments, 400 turns each; an hour on two cores
    .venv/bin/python benchmarks/crafter_memory.py --layers 2   # the same turns by the first two of its thirty layers
    .venv/bin/python benchmarks/crafter_memory.py --turns 8 --per-iteration 2 --growing 8 --growing-per-iteration 2

SmolLM2-135M-Instruct plays and is trained; episodes follow each other. Peak memory is reset before every iteration:
that of the process, or of the accelerator if there is one. What is kept is what is left after it, once freed memory was
given back. The last iteration is compared with the second, the first in which no environment begins without a history,
and one half of them with the other. Prompts that begin alike are computed once, and how many do differs with what
happens in the game: the budget of a micro-batch is small enough that each iteration fills several. Writes
`crafter_memory.md`, `.png` and `.json`. Each of the two runs is kept below `--kept` when it is whole, and not made
again; it has to be one process, since another begins with a heap without holes, which would hide what is looked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
import matplotlib as mpl
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_agentrl.agents import KL, Compute, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows
from lightning_agentrl.models.allocator import keep_freed_memory, resident_bytes, trim
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.models.demo import demo_model_folder
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types import Rollout

ROOT = Path(__file__).resolve().parents[1]
ENVS, HISTORY, WINDOW = 4, 2, 8192  # turns of the past; tokens
# In bfloat16 a CPU keeps a compiled product for each of the last 1,024 shapes, which hides what is looked for.
PRECISION: Literal["bf16-mixed", "32-true"] = "bf16-mixed" if torch.cuda.is_available() else "32-true"
BUDGET = 2048  # tokens of a micro-batch
COLUMNS = {
    "tokens": "tokens per turn",
    "computed": "tokens per turn that an update computes",
    "largest": "tokens of the largest micro-batch",
    "kept_mb": "memory kept, MB",
    "peak_mb": "peak memory, MB",
    "cpu_seconds": "CPU seconds per turn",
}
TEXT = """\
# Memory of long episodes

See whether memory and time grow in long episodes. {envs} Crafter environments play {turns} turns each, in iterations of
{per_iteration} turns. The model is the first {layers} of the 30 layers of SmolLM2-135M-Instruct, in {precision} on
{device}, with the system prompt of the game (`goals: all`); a reply is one action. Prompts show the last {history}
turns, and a micro-batch has at most {budget} tokens, unless one prompt is longer. *Memory kept* is measured after an
iteration, when freed memory has been returned. An update computes shared beginnings of prompts once, so its tokens
depend on how varied the game is. Written by `benchmarks/crafter_memory.py`.

![tokens and memory per iteration](crafter_memory.png)

{table}

With `FullMemory`, samples grow up to {window} tokens. Figures of {growing} turns, {growing_per_iteration} an iteration:

{contrast}
"""


class Diary(RolloutCallback):
    """A row for each iteration."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self.cpu = time.process_time()

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.turns = len(rollout.turns)
        self.tokens = sum(len(segment) for sample in rollout.samples for segment in sample.segments)
        rows, reader = action_rows(rollout), agent.reader
        with torch.enable_grad():  # as an update cuts them
            self.sizes = [reader.pack([rows[i] for i in index]).tokens for index in reader.micro_batches(rows)]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cpu = time.process_time() - self.cpu
        row = {"tokens": self.tokens / self.turns, "computed": sum(self.sizes) / self.turns}
        row |= {"largest": max(self.sizes), "peak_mb": peak_bytes() / 1e6, "cpu_seconds": cpu / self.turns}
        gc.collect()
        trim()
        self.rows.append(row | {"kept_mb": kept_bytes() / 1e6})
        print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)


def peak_bytes() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def kept_bytes() -> float:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_bytes()


def shortened(layers: int, folder: str) -> str:
    """Write the first layers of the demo model, and return where."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_folder(), num_hidden_layers=layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model_folder()).save_pretrained(folder)
    return folder


def play(turns: int, per_iteration: int, grows: bool, model: str) -> list[dict[str, float]]:
    """Play and train for so many turns of each environment, with the heap that the command has."""
    keep_freed_memory()
    diary = Diary()
    data = RolloutDataModule(
        env=EnvConfig("agentrl_envs:CrafterText-v0", {"goals": "all"}),
        num_envs=ENVS,
        turns_per_env=per_iteration,
        mini_batch_turns=ENVS * per_iteration,
        memory=FullMemory() if grows else WindowMemory(HISTORY),
        prompt=PromptFormat(think=False, max_prompt_tokens=WINDOW - 16),
        interaction=TurnInteraction(max_reply_tokens=8),
        validation=ValidationConfig(episodes=0),
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision=PRECISION,
        max_epochs=-(-turns // per_iteration),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[diary],
    )
    compute = Compute(max_tokens_per_micro_batch=BUDGET)
    trainer.fit(PPOAgent(model, critic=SharedCritic(), kl=KL(reward=0.0), compute=compute), data)
    return diary.rows


def in_own_process(kept: Path, layers: int, turns: int, per_iteration: int, *grows: str) -> list[dict[str, float]]:
    """Return the rows of a run, whose memory is its own; those that are kept if there was one with these numbers."""
    given = ["--layers", str(layers), "--turns", str(turns), "--per-iteration", str(per_iteration), *grows]
    file = kept / f"{'_'.join(given).replace('-', '')}.json"
    if not file.is_file():
        command = [sys.executable, __file__, "--play", *given]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        kept.mkdir(parents=True, exist_ok=True)
        file.write_text(ran.stdout.splitlines()[-1])
    rows: list[dict[str, float]] = json.loads(file.read_text())
    return rows


def table(rows: list[dict[str, float]]) -> str:
    """Return the second iteration beside the last one, and the halves of what began with a history, as Markdown."""
    if len(rows) < 3:
        return "Fewer than three iterations.\n"
    whole = rows[1:]
    halves = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    lines = [
        "| | iteration 2 | last iteration | difference | mean of the first half | of the second half | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, name in COLUMNS.items():
        pairs = (whole[0][key], whole[-1][key]), tuple(fmean(row[key] for row in half) for half in halves)
        cells = [f"{one:,.1f} | {other:,.1f} | {100 * (other / one - 1):+.1f} %" for one, other in pairs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, float]]], per_iteration: tuple[int, int], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, key in zip(axes, ("tokens", "peak_mb"), strict=True):
        for (name, rows), turns in zip(runs.items(), per_iteration, strict=True):
            axis.plot([turns * i for i in range(1, len(rows) + 1)], [row[key] for row in rows], marker=".", label=name)
        axis.set(xlabel="turns of each environment", ylabel=COLUMNS[key], ylim=(0, None))
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens, memory and CPU time of long episodes of Crafter.")
    parser.add_argument("--turns", type=int, default=400, help="of each environment, with a window of the past")
    parser.add_argument("--growing", type=int, default=30, help="of each environment, with growing samples")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--per-iteration", type=int, default=40, help="turns of each environment")
    parser.add_argument("--growing-per-iteration", type=int, default=6, help="the same with growing samples")
    parser.add_argument("--layers", type=int, default=30, help="of the model, from the first one on")
    parser.add_argument("--kept", type=Path, default=ROOT / "runs" / "crafter_memory", help="where runs are kept")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--grows", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        with tempfile.TemporaryDirectory() as folder:
            model = shortened(given.layers, folder)
            print(json.dumps(play(given.turns, given.per_iteration, given.grows, model)))
        return
    where = given.kept, given.layers
    runs = {
        f"last {HISTORY} turns": in_own_process(*where, given.turns, given.per_iteration),
        "whole episode": in_own_process(*where, given.growing, given.growing_per_iteration, "--grows"),
    }
    window, whole = runs.values()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU thread(s)"
    figures = {"envs": ENVS, "turns": given.turns, "per_iteration": given.per_iteration, "history": HISTORY}
    figures |= {"growing": given.growing, "growing_per_iteration": given.growing_per_iteration, "layers": given.layers}
    figures |= {"budget": BUDGET, "window": WINDOW, "precision": PRECISION, "device": device}
    text = TEXT.format(**figures, table=table(window), contrast=table(whole))
    (given.out / "crafter_memory.json").write_text(json.dumps({**figures, "runs": runs}, indent=1) + "\n")
    (given.out / "crafter_memory.md").write_text(text)
    draw(runs, (given.per_iteration, given.growing_per_iteration), given.out / "crafter_memory.png")
    print(text)


if __name__ == "__main__":
    main()
