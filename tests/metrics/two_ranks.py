"""What each of two processes says about its part of the rollout. A module of its own, since processes import it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_agentrl.agents.metrics_of_run import RecentEpisodes, describe
from lightning_agentrl.distributed import over_ranks, sum_over_ranks
from lightning_agentrl.metrics.episodes import EpisodeMetrics, EpisodeResult
from lightning_agentrl.metrics.stages import StageClock
from tests.metrics.rollouts import by_hand, of_envs


@dataclass(frozen=True)
class Split:
    """How the environments of the rollout lie on two processes."""

    first: Sequence[int]
    second: Sequence[int]
    without_thoughts_of: Sequence[int] = ()


SPLITS = {
    "every process has ended episodes": Split([0], [1, 2]),  # errors of one kind happen in environment 2 only
    "episodes end in one process only": Split([0, 1], [2]),
    "thoughts are in one process only": Split([0], [1, 2], without_thoughts_of=[0]),
    "thoughts are nowhere": Split([0, 1], [2], without_thoughts_of=[0, 1, 2]),
    "one process has no turns": Split([0, 1, 2], []),
}
WINDOW = 4  # episodes; two rollouts have six


def describe_part(split: Split, envs: Sequence[int]) -> dict[str, Any]:
    """Everything that is said of a rollout, by a process that has these environments."""
    rollout = of_envs(by_hand(split.without_thoughts_of), envs)
    recent = RecentEpisodes(WINDOW, enough=1)
    windows = [recent.update(rollout) for _ in range(2)]
    return {"describe": describe(rollout, sum_over_ranks), "windows": windows, "state": recent.state_dict()}


FAR = [EpisodeResult(bool(i % 2), 1e9 + 0.75 * i, 2, 2, progression=i / 8) for i in range(5)]  # their squares cancel


def held_out(results: Sequence[EpisodeResult]) -> dict[str, float]:
    metrics = EpisodeMetrics()
    metrics.update(results)
    return metrics.compute()


def times(rank: int) -> dict[str, float]:
    """Process 0 collects 8 turns in 2 s, process 1 in 4 s and so on; only process 1 validates."""
    with mock.patch("time.perf_counter") as now:
        now.return_value = 0.0
        clock = StageClock()
        seconds = [{"collect": 2.0, "update": 4.0}, {"collect": 4.0, "update": 2.0, "validate": 3.0}][rank]
        for name, duration in seconds.items():
            with clock.stage(name):
                now.return_value += duration
        clock.count("collect", turns=8, tokens=[80, 100][rank])
        clock.count("update", turns=[6, 10][rank], tokens=[70, 110][rank])
        return over_ranks(clock.read(world_size=2))


def run(rank: int, folder: str) -> None:
    """The work of one process."""
    torch.set_num_threads(1)
    # they meet in a file, so no port can be taken
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    report = {
        "parts": {name: describe_part(s, (s.first, s.second)[rank]) for name, s in SPLITS.items()},
        "held_out": held_out([EpisodeResult(True, 3.0, 2, 2), EpisodeResult(False, -1.0, 5, 3)] if rank == 0 else []),
        "far": held_out(FAR[:3] if rank == 0 else FAR[3:]),
        "times": times(rank),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
