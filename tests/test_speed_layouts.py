"""The benchmarks: that every contender gets the tokens that the tables name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.speed.comparisons import LONG, LONG_APART, ROW, SHORT
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case, episode_rows, turn_rows
from benchmarks.speed.ours import GivenData, PolicyAgent, make_trainer, rollout_of


def shared_tokens(prompts: list[list[int]]) -> int:
    """Leading tokens that all prompts have in common."""
    return next(i for i, column in enumerate(zip(*prompts, strict=True)) if len(set(column)) > 1)


@pytest.mark.parametrize(("case", "shared"), [(SHORT, 75), (LONG, 200), (LONG_APART, 0), (ROW, 200)])
def test_turns_share_the_tokens_that_the_case_names(case: Case, shared: int) -> None:
    rows = turn_rows(case, 128)
    assert len(rows) == 128
    assert {len(row.prompt) for row in rows} == {case.prompt}
    assert shared_tokens([row.prompt for row in rows]) == shared
    assert all(len(row.completion) == len(row.advantages) == 8 and all(row.sampled) for row in rows)


def test_turns_are_the_same_for_every_contender() -> None:
    assert turn_rows(SHORT, 16) == turn_rows(Case(85, 75), 16)
    assert turn_rows(SHORT, 16) != turn_rows(SHORT, 16, seed=1)


def test_an_episode_row_holds_observations_and_replies_of_its_turns() -> None:
    turns, episodes = turn_rows(SHORT, 128), episode_rows(SHORT, 128)
    assert len(episodes) == 16
    assert {(len(row.prompt), len(row.prompt) + len(row.completion)) for row in episodes} == {(87, 235)}
    assert shared_tokens([row.prompt for row in episodes]) == 75
    for number, row in enumerate(episodes):
        own = turns[8 * number : 8 * number + 8]
        sampled = [token for token, flag in zip(row.completion, row.sampled, strict=True) if flag]
        advantages = [x for x, flag in zip(row.advantages, row.sampled, strict=True) if flag]
        assert sampled == [token for turn in own for token in turn.completion]
        assert advantages == [x for turn in own for x in turn.advantages]
        assert row.prompt[75:85] == own[0].prompt[75:]
        for k, turn in enumerate(own[1:]):
            start = 8 + 20 * k
            assert row.completion[start : start + 10] == turn.prompt[75:]
            assert row.sampled[start : start + 20] == [0] * 12 + [1] * 8


def test_our_contender_takes_a_step_on_the_given_turns(tiny_folder: Path) -> None:
    """With the agent as it is now, in the Trainer that is timed."""
    job = Job(Case(prompt=20, shared=12), 4, str(tiny_folder), precision="float32", micro_batch=64, lr=1e-3)
    agent = PolicyAgent(job)
    size = AutoConfig.from_pretrained(tiny_folder).vocab_size
    rows = [
        replace(r, prompt=[t % size for t in r.prompt], completion=[t % size for t in r.completion]) for r in job.rows()
    ]
    trainer = make_trainer(job, max_epochs=1)
    trainer.fit(agent, GivenData(rollout_of(rows)))
    before = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    after = agent.actor.lm.state_dict()
    assert trainer.callback_metrics["grad_norm/actor"] > 0
    assert max((after[name] - before[name]).abs().max() for name in before) > 1e-4
