"""What forks cost: `rollout/forked_*` and `time/forks_seconds`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lightning_agentrl.distributed import Sum, over_ranks
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.metrics.stages import StageClock
from tests.metrics.clock import FakeClock
from tests.metrics.rollouts import by_hand

OF_FORKS = {"rollout/forked_states": 3, "rollout/forked_turns": 3 * 8, "time/forks_seconds": 2.0}


def test_every_number_by_hand(monkeypatch):
    rollout, now = by_hand(), FakeClock(monkeypatch)
    values = torch.full(rollout.action_mask.shape, math.nan)
    values[0, 0], values[1, 0] = 0.5, 0.0
    ends = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, math.nan])  # of rows 2 and 5, which the rollout cuts: 0, and unknown
    known = ends.nan_to_num(0.5)
    samples = [
        replace(sample, turns=tuple(replace(turn, forked_turns=3) for turn in sample.turns))
        for sample in rollout.samples
    ]
    forked = replace(rollout, samples=tuple(samples)).union(state_values=values, forked_end_values=ends)
    clock = StageClock()
    with clock.stage("collect"), clock.part("forks"):
        now.wait(2.0)
    numbers = over_ranks({**rollout_numbers(forked), **clock.read()})
    assert {name: numbers[name] for name in OF_FORKS} == OF_FORKS
    assert rollout_numbers(forked.union(forked_end_values=known))["rollout/forked_states"] == Sum(4)
    assert not OF_FORKS.keys() & rollout_numbers(rollout).keys()
