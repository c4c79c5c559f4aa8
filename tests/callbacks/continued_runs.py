"""Runs of every kind that end in the middle and go on. A module of its own: processes import it.

Two warm-up iterations and two of training, each with a validation, in float64 on tiny models.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lightning_agentrl.advantages import GRPO, DualDiscountGAE
from lightning_agentrl.callbacks import Chain, CriticWarmup, RunCheckpoints, TurnLog
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.prompts.memory import FullMemory
from lightning_agentrl.rollout import (
    AgentProgram,
    GroupRollout,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
)
from lightning_agentrl.tools.replay import bisect_runs
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import optimizer_states
from tests.started import forkserver

ITERATIONS = 4
GROUPS = {
    "groups": GroupRollout(size=2, per_rollout=4, mini_batches=2, ahead=4, ahead_turns=1),
    "turns_per_env": 8,
    "mini_batch_turns": 128,
}
MODES: dict[str, dict[str, Any]] = {
    "windowed": {},
    "full": {"memory": FullMemory()},
    "groups": GROUPS,
    "ahead": {"max_staleness": 1},
    "groups ahead": {**GROUPS, "max_staleness": 2},
}
AGENTS: dict[str, dict[str, Any]] = {  # agent programs: their advisers are asked one after the other, or at once
    "agents in_turn": {"turns_per_env": 6, "mini_batch_turns": 12},
    "agents at_once groups": {"groups": GroupRollout(size=2, per_rollout=4, mini_batches=2)},
}
CREW = Path(__file__).parents[1] / "gateway" / "agents" / "crew.py"


def run(
    path: Path, folder: Path, mode: str, *callbacks: L.Callback, start: Path | None = None, devices: int = 1
) -> Path:
    """Fit; the link to the newest checkpoint.

    Args:
        path: of the run.
        folder: of the model.
        mode: one of ``MODES``.
        callbacks: further ones, before the others.
        start: checkpoint to go on with.
        devices: processes.
    """
    grouped = "groups" in mode
    agent = make_agent(
        folder, SeparateCritic() if grouped else SharedCritic(), advantage=GRPO() if grouped else DualDiscountGAE()
    )
    saving = RunCheckpoints(dirpath=str(path))
    warmup = CriticWarmup(rollouts=2, rounds=1, fraction=1.0)
    every = [*callbacks, warmup, TurnLog(str(path / "turns")), Chain(), saving]
    settings: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 1.0}
    if devices > 1:
        settings |= {"devices": devices, "strategy": "ddp"}
    data = agents_data(path, mode) if mode in AGENTS else make_data(**MODES[mode])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(path, ITERATIONS, every, **settings).fit(agent, data, ckpt_path=start)
    return path / "last.ckpt"


def agents_data(path: Path, mode: str) -> RolloutDataModule:
    """Agent programs of a mode; each of their processes leaves a file with its number in the folder `pids` of a run."""
    (path / "pids").mkdir(exist_ok=True)
    tasks = path.parent / "tasks.jsonl"  # the same for all runs of a test
    tasks.write_text('{"hint": "It is odd."}\n{"hint": "It is even."}\n')
    program = AgentProgram(
        [sys.executable, str(CREW), str(path / "pids"), mode.split()[1]],
        str(tasks),
        preload=["urllib.request", "random"],
    )
    validation, limits = ValidationConfig(episodes=2, num_envs=2, every=1), TurnInteraction(max_reply_tokens=4)
    return RolloutDataModule(
        program, num_envs=4, validation=validation, interaction=limits, seed=3, stall_seconds=0, **AGENTS[mode]
    )


def in_processes(
    path: Path,
    folder: Path,
    mode: str,
    callbacks: Sequence[L.Callback] = (),
    start: Path | None = None,
    devices: int = 1,
    seconds: float = 120.0,
) -> list[int | None]:
    """Run in processes of their own; their exit codes, None for one that does not end."""
    context = forkserver()
    meeting = path / f"meeting-{len(list(path.glob('meeting-*')))}"
    processes = [
        context.Process(target=_work, args=(rank, meeting, path, folder, mode, callbacks, start, devices))
        for rank in range(devices)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _work(
    rank: int,
    meeting: Path,
    path: Path,
    folder: Path,
    mode: str,
    callbacks: Sequence[L.Callback],
    start: Path | None,
    devices: int,
) -> None:
    torch.set_num_threads(1)
    log = os.open(path / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if devices > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=devices)
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}  # tells Lightning that the processes are there
    else:
        meeting.touch()
    run(path, folder, mode, *callbacks, start=start, devices=devices)


def turns(path: Path) -> list[dict[str, Any]]:
    """What was logged of every turn, but for times and the id of the run."""
    lines = [line for file in sorted((path / "turns").glob("*.jsonl")) for line in file.read_text().splitlines()]
    records = [
        {k: v for k, v in json.loads(line).items() if not k.endswith("_seconds") and k != "run_id"} for line in lines
    ]
    return sorted(records, key=lambda record: (record["iteration"], record["env"], record["episode"], record["turn"]))


def assert_same_chain(one: Path, other: Path) -> None:
    """What both runs computed in every iteration, to the bit, from their folders."""
    compared, *said = bisect_runs(one, other, 0.0)
    assert compared.startswith(f"compared iterations 1 to {ITERATIONS} of ")
    assert said == ["first difference: none, equal to the bit"]


def assert_same_end(one: Path, other: Path, counters: bool = True) -> None:
    """Checkpoints of two runs: weights, Adam, environments and, unless they were saved at other moments of their last
    iteration, counters, to the bit.
    """
    a, b = (torch.load(path, weights_only=True) for path in (one, other))
    assert_equal(a["state_dict"], b["state_dict"])
    assert_equal(optimizer_states(a), optimizer_states(b))
    for checkpoint in (a, b):
        checkpoint["loops"] = _counters(checkpoint["loops"]["fit_loop"])
    for part in ("RolloutDataModule", "recent_episodes", "attempts", "global_step", *(["loops"] if counters else [])):
        assert_equal(a[part], b[part])


def _counters(loops: Any) -> Any:
    """Counters of loops without those that Lightning lets run on over a resume: totals, validations, the x axis."""
    if not isinstance(loops, dict):
        return loops
    kept = {key: value for key, value in loops.items() if key not in ("total", "_batches_that_stepped")}
    return {key: _counters(value) for key, value in kept.items() if "val_loop" not in key}


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Plain types and tensors; how long things took does not count."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {"env_seconds", "engine_seconds"}:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, two, f"{where}/{number}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where
