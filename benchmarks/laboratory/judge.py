"""The judge of advice: six settings of the recipe on ten held-out tasks, in paired runs.

    python -m benchmarks.laboratory.judge --starts          # clone and measure the starts of the tasks
    python -m benchmarks.laboratory.judge --share 1/2       # half of the runs; 2/2 in another process
    python -m benchmarks.laboratory.judge --task wind       # those of one task
    python -m benchmarks.laboratory.judge --advise          # ask `agentrl advise` about every task
    python -m benchmarks.laboratory.judge --report          # the page from the runs that are there

A run that is there is not made again, so this can be stopped at any time. What is advised is kept in
``runs/held_out/advice.json``, the name of a setting for each task; see :func:`advice`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
from torch import Tensor

from benchmarks.laboratory.arms import TURNS, WARMUP_ROUNDS, Arm, agent_of, rollouts, warmup_of, warmup_turns
from benchmarks.laboratory.cells import DISCOUNTS
from benchmarks.laboratory.cloning import cloned
from benchmarks.laboratory.fits import quiet, quiet_trainer
from benchmarks.laboratory.held_out import ROOT, RUNS, TASKS, Task, agent_and_data
from benchmarks.laboratory.judge_report import page
from benchmarks.laboratory.records import save, share
from benchmarks.laboratory.side_by_side import SideBySide
from lightning_agentrl.advantages import GAE, GRPO, GiGPO
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.commands.advise import advise_agent
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.types import Rollout

RECORD = ROOT / "docs" / "results" / "advise.json"
SEEDS = 3
GROUP = 8
PLAYED = 12 * TURNS  # sampled turns of a run, those of a warm-up included
EVERY = 2 * TURNS  # turns from one look at the policy to the next
EPISODES = 256  # held out, played at each look
SETTINGS = ("short_cuts", "long_cuts", "one_pair", "groups", "groups_by_state", "warm_up")


def arms(mean_turns: float) -> dict[str, Arm]:
    """Return the settings by name, given how long the episodes of the start are."""
    episodes = max(round(TURNS / mean_turns / GROUP), 1) * GROUP
    return {
        "short_cuts": Arm(),
        "long_cuts": Arm(turns_per_env=64),
        "one_pair": Arm(GAE, DISCOUNTS, turns_per_env=64),
        "groups": Arm(GRPO, group=GROUP, episodes=episodes),
        "groups_by_state": Arm(GiGPO, {"gamma": 0.99}, group=GROUP, episodes=episodes),
        "warm_up": Arm(warmup=WARMUP_ROUNDS),
    }


def advice(folder: Path) -> dict[str, str]:
    """Return the setting that is advised for each task; empty where there is no advice yet."""
    path = folder / "advice.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    wrong = [f"{task}: {setting}" for task, setting in found.items() if task not in TASKS or setting not in SETTINGS]
    if wrong:
        raise ValueError(f"{path} names {', '.join(wrong)}; tasks are {', '.join(TASKS)}, and {', '.join(SETTINGS)}")
    return found


def ask(tasks: Sequence[str], folder: Path) -> None:
    """Let the package advise on tasks, and keep the settings that it names."""
    found = advice(folder)
    for name in tasks:
        L.seed_everything(0, verbose=False)
        facts, advised = advise_agent(*agent_and_data(TASKS[name], folder))
        found[name] = advised.setting.value
        print(f"{name}: {advised.setting}, {advised.sure}; {advised.choices[0].why} ({facts.episodes} episodes)")
        save(folder / "advice.json", json.dumps(found))


class PlayedCurve(RolloutCallback):
    """Plays held-out episodes now and then, and ends the training once enough turns have been sampled.

    Args:
        held_out: plays them.
        warm: turns that are sampled before the actor moves.
    """

    def __init__(self, held_out: SideBySide, warm: int) -> None:
        self.held_out = held_out
        self.turns: list[int] = []
        self.curve: list[float] = []
        self.success: list[float] = []
        self.seconds = 0.0
        self._sampled = 0
        self._look()
        if warm:
            self._sampled = warm
            self.turns.append(warm)
            self.curve.append(self.curve[0])
            self.success.append(self.success[0])

    def _look(self, weights: Mapping[str, Tensor] | None = None) -> None:
        started = time.perf_counter()
        played = self.held_out.play(weights)
        self.turns.append(self._sampled)
        self.curve.append(round(played.total_reward, 5))
        self.success.append(round(played.success, 5))
        self.seconds += time.perf_counter() - started

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if agent.phase == "train":
            self._sampled += len(rollout.turns)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.phase != "train":
            return
        trainer.should_stop = self._sampled >= PLAYED
        if trainer.should_stop or self._sampled >= self.turns[-1] + EVERY:
            self._look({name: x.detach() for name, x in pl_module.actor.lm.state_dict().items()})


def measured_start(task: Task, folder: Path) -> dict[str, float]:
    """Return how good the start of a task and its expert without noise are; measure them if that is not kept yet.

    They play the episodes that are held out in the runs.
    """
    path = folder / f"{task.name}-{EPISODES}.json"
    if not path.exists():
        played = SideBySide(task, cloned(task, folder), held_out_seeds()[:EPISODES]).play()
        found = {
            "success": played.success,
            "return": played.total_reward,
            "mean_turns": played.turns,
            "expert": expert_return(task),
        }
        save(path, json.dumps({name: round(value, 5) for name, value in found.items()}))
    kept: dict[str, float] = json.loads(path.read_text())
    return kept


def expert_return(task: Task) -> float:
    """Return the mean return of the expert without noise in the episodes that are held out."""
    env, returns = task.make(), []
    for seed in held_out_seeds()[:EPISODES]:
        env.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.best())
            over, total = terminated or truncated, total + reward
        returns.append(total)
    return fmean(returns)


def play_held_out(task: Task, model: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """Train one setting from the cloned start until so many turns are sampled.

    Args:
        task: the game.
        model: folder of the policy to start from.
        arm: the setting.
        seed: of levels and noise.

    Returns:
        ``curve``: mean return of held-out episodes; ``turns`` sampled until then; ``success`` of the same episodes;
        ``seconds``, and those of them in which held-out episodes were played.
    """
    agent = agent_of(model, arm, SeparateCritic() if arm.estimator.needs_values else None)
    started = time.perf_counter()
    curve = PlayedCurve(SideBySide(task, model, held_out_seeds()[:EPISODES]), warmup_turns(arm))
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(Path(folder), PLAYED, [curve, *warmup_of(arm)]).fit(agent, rollouts(task, arm, seed))
    return {
        "curve": curve.curve,
        "turns": curve.turns,
        "success": curve.success,
        "seconds": round(time.perf_counter() - started, 2),
        "held_out_seconds": round(curve.seconds, 2),
    }


def key(task: Task, arm: Arm, seed: int) -> str:
    """Return what tells a run apart from all that differ in what they would show."""
    settings = repr((task.name, arm, PLAYED, EVERY, EPISODES))
    return f"run-{hashlib.sha256(settings.encode()).hexdigest()[:12]}-{seed}"


def run(tasks: Sequence[str], settings: Sequence[str], seeds: range, share: tuple[int, int], folder: Path) -> None:
    """Make the runs that are not there, one seed of all tasks and settings after the other."""
    part, parts = share
    wanted = [(seed, name, setting) for seed in seeds for name in tasks for setting in settings]
    for seed, name, setting in wanted[part - 1 :: parts]:
        task = TASKS[name]
        start = measured_start(task, folder)
        arm = arms(start["mean_turns"])[setting]
        path = folder / f"{key(task, arm, seed)}.json"
        if path.exists():
            continue
        done = play_held_out(task, cloned(task, folder), arm, seed)
        save(path, json.dumps(done))
        print(
            f"{name}, {setting}, seed {seed}: return {done['curve'][0]:.2f} to {done['curve'][-1]:.2f}, "
            f"{done['seconds']:.0f} s, of them {done['held_out_seconds']:.0f} s for held-out episodes",
            flush=True,
        )


def record(folder: Path, kept: Path) -> dict[str, Any]:
    """Return all that the page is made of: what a folder has, and what it lacks from what was kept before.

    A task has as many seeds, from the first on, as all of its settings were run with, two at least: by their places
    :func:`restore` knows the seeds of the runs again.
    """
    before: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    found: dict[str, Any] = {"played": PLAYED, "tasks": {}, "advice": before.get("advice", {}) | advice(folder)}
    for name, task in TASKS.items():
        old = before.get("tasks", {}).get(name, {})
        path = folder / f"{task.name}-{EPISODES}.json"
        start = json.loads(path.read_text()) if path.exists() else old.get("start")
        if start is None:
            continue
        by_setting = arms(start["mean_turns"]).items()
        files = [{name: folder / f"{key(task, arm, seed)}.json" for name, arm in by_setting} for seed in range(SEEDS)]
        whole = list(takewhile(lambda of_seed: all(file.exists() for file in of_seed.values()), files))
        runs = {setting: [json.loads(of_seed[setting].read_text()) for of_seed in whole] for setting, _ in by_setting}
        if len(whole) < 2:
            runs = old.get("runs", {})
        found["tasks"][name] = {"about": task.about, "start": start, "runs": runs}
    return found


def restore(folder: Path, kept: Path) -> None:
    """Put the runs that were kept into a folder that lacks them, so that they are not made again."""
    tasks = json.loads(kept.read_text())["tasks"] if kept.exists() else {}
    for name, of_task in tasks.items():
        by_setting = arms(of_task["start"]["mean_turns"])
        files = {folder / f"{name}-{EPISODES}.json": of_task["start"]}
        for setting, runs in of_task["runs"].items():
            files |= {folder / f"{key(TASKS[name], by_setting[setting], i)}.json": run for i, run in enumerate(runs)}
        for file, content in files.items():
            if not file.exists():
                save(file, json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS), help="tasks; all by default")
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=list(SETTINGS), help="all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each setting; the page has the first three")
    parser.add_argument("--share", type=share, default="1/1", help="of the runs, for several processes: 1/2 and 2/2")
    parser.add_argument("--starts", action="store_true", help="train nothing; clone and measure the starts")
    parser.add_argument("--advise", action="store_true", help="train nothing; ask for advice on the tasks")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page of the runs that are there")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of runs and models")
    wanted = parser.parse_args()
    quiet()
    restore(wanted.runs, RECORD)
    if wanted.report:
        found = record(wanted.runs, RECORD)
        save(RECORD, json.dumps(found) + "\n")
        save(RECORD.with_suffix(".md"), page(found))
    elif wanted.advise:
        ask(wanted.task, wanted.runs)
    elif wanted.starts:
        for name in wanted.task:
            print(name, measured_start(TASKS[name], wanted.runs), flush=True)
    else:
        part, parts = wanted.share
        run(wanted.task, wanted.setting, range(wanted.seeds), (part, parts), wanted.runs)


if __name__ == "__main__":
    main()
