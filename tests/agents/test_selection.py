"""Which rows of a rollout nothing can be learnt from, and that their tokens are left out."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from lightning_agentrl.advantages import Forked
from lightning_agentrl.agents.selection import corrected, lost_rows, without_rows
from lightning_agentrl.losses import Bypass, NoCorrection, RatioRejection, RejectOnly, TruncatedWeights
from lightning_agentrl.types import Rollout, Sample, Scores, StopReason
from tests.types.samples import action, observation, prompt, turn

T, F = True, False


def row(env: int, episode: int = 0, index: int = 0, group: int | None = None, fault: bool = False) -> Sample:
    end = {"truncated": True, "stop": StopReason.ENV_FAULT} if fault else {}
    return Sample((prompt(1), action(2, 3)), (turn(env=env, episode=episode, index=index, group=group, **end),))


def test_of_fixed_turns_an_episode_that_a_fault_ended_is_lost_with_all_its_rows_unless_a_value_stands_for_the_rest():
    rows = [row(0), row(0, index=1, fault=True), row(0, episode=1), row(1), row(1, index=1)]
    rollout = Rollout.from_samples(rows)
    assert lost_rows(rollout, bootstraps=False, group_size=None).tolist() == [T, T, F, F, F]
    assert lost_rows(rollout, bootstraps=True, group_size=None).tolist() == [F] * 5


def test_an_episode_is_lost_where_no_branch_tells_what_its_first_or_its_next_state_is_worth():
    rollout = Rollout.from_samples([row(env, index=index) for env in range(4) for index in (6, 5)])
    nan = math.nan
    values = torch.tensor([1.0, 1.0, nan, 1.0, 1.0, nan, 1.0, 1.0])  # none before turn 6 of env 1 and turn 5 of env 2
    ends = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5, 0.0, nan, 0.0])  # none after env 3
    forked = rollout.union(state_values=values[:, None].repeat(1, 2), forked_end_values=ends)
    assert lost_rows(forked, bootstraps=False, group_size=None).tolist() == [F, F, F, F, T, T, T, T]
    assert lost_rows(forked, bootstraps=True, group_size=None).tolist() == [F] * 8
    grouped = Rollout.from_samples([row(env, index=index, group=env // 2) for env in range(4) for index in (6, 5)])
    forked = grouped.union(state_values=values[:, None].repeat(1, 2), forked_end_values=ends)
    assert lost_rows(forked, bootstraps=False, group_size=2).tolist() == [F, F, F, F, T, T, T, T]


def test_an_advantage_that_nothing_is_known_of_is_in_no_growing_sample_that_is_trained_on():
    """Forks of every state, each of which may be lost: what is 0 by ignorance is left out, what is known is right."""
    values = torch.tensor([1.0, math.nan, 3.0, 0.5], dtype=torch.float64)
    for lost in range(4):
        turns = [turn(index=j, reward=1.0) for j in range(3)]
        turns.append(turn(index=3, reward=1.0, terminated=True, stop=StopReason.ENV_DONE))
        said = [part for j in range(4) for part in (observation(1), action(j))]
        sample = Sample((prompt(1), *said), tuple(turns))
        known = values.where(torch.arange(4) != lost, math.nan)
        rollout = Rollout.from_samples([sample]).union(state_values=known[None], forked_end_values=torch.zeros(1))
        advantages, _ = Forked(gamma=1.0, whiten=False).estimate(rollout)
        left_out = bool(lost_rows(rollout, bootstraps=False, group_size=None))
        assert left_out == (lost == 0)  # else the state before tells
        valued = [j for j in range(4) if not known[j].isnan()]
        for j, until in pairwise([*valued, 4]):
            after = 0.0 if until == 4 else float(known[until])
            assert advantages[0, j:until].tolist() == [until - j + after - float(known[j])] * (until - j)
        assert not advantages[0, : valued[0]].any()


def test_a_group_that_lacks_an_episode_is_lost():
    whole = [row(0, group=4), row(1, group=4), row(1, index=1, group=4)]
    failed = [row(2, group=5), row(3, group=5, fault=True)]
    missing = [row(4, group=6), row(4, index=1, group=6)]
    sides = [row(6, group=7), row(6, episode=1, group=7), row(7, group=7)]  # one side had no turn in the second game
    rollout = Rollout.from_samples([*whole, *failed, *missing, *sides])
    for bootstraps in (False, True):
        assert lost_rows(rollout, bootstraps, group_size=2).tolist() == [F] * 3 + [T] * 4 + [F] * 3


def test_a_group_whose_greedy_episode_is_lost_is_lost():
    rollout = Rollout.from_samples([row(0, group=4), row(1, group=4), row(2, group=5), row(3, group=5)])
    rollout = rollout.union(greedy_scores=torch.tensor([0.5, 0.5, math.nan, math.nan]))
    lost_B = lost_rows(rollout, bootstraps=False, group_size=2)
    assert lost_B.tolist() == [F, F, T, T]
    left = without_rows(rollout, lost_B)
    assert left.greedy_scores is not None
    assert left.greedy_scores.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_no_token_of_lost_rows_is_trained_on_nor_one_that_was_rejected():
    rollout = Rollout.from_samples([row(0), row(1), row(2)])
    lost_B = torch.tensor([F, T, F])
    assert without_rows(rollout, lost_B).trained_mask.tolist() == [[T, T], [F, F], [T, T]]
    rejected = rollout.union(loss_mask=torch.tensor([[T, F], [T, T], [F, F]]))
    assert without_rows(rejected, lost_B).trained_mask.tolist() == [[T, F], [F, F], [F, F]]
    assert without_rows(rejected, torch.tensor([F, F, F])) is rejected


def test_a_correction_weighs_and_rejects_by_trainer_over_engine_what_is_trained_on():
    rollout = Rollout.from_samples([row(0), row(1)])
    ratios = torch.tensor([[0.5, 4.0], [3.0, 1.0]], dtype=torch.float64)
    rollout = rollout.union(
        rollout_logps=torch.full((2, 2), -1.0, dtype=torch.float64),
        scores=Scores(old_logps=ratios.log() - 1.0),
        loss_mask=torch.tensor([[T, T], [T, F]]),
    )
    weighed = corrected(rollout, TruncatedWeights(cap=2.0), lambda x: x)
    torch.testing.assert_close(weighed.weights, torch.tensor([[0.5, 2.0], [2.0, 0.0]], dtype=torch.float64))
    assert weighed.trained_mask.tolist() == [[T, T], [T, F]]
    kept = corrected(rollout, RejectOnly([RatioRejection("token", 0.4, 3.5)]), lambda x: x)
    assert (kept.weights, kept.trained_mask.tolist()) == (None, [[T, F], [T, F]])
    for nothing in (None, NoCorrection(), Bypass()):
        assert corrected(rollout, nothing, lambda x: x) is rollout
