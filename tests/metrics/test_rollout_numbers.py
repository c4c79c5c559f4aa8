"""What happened in turns, episodes and environments: `rollout/*`, `stop/*`, `env/*`, `time/env_to_generation`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_agentrl.distributed import Mean, Number, Sum, over_ranks
from lightning_agentrl.metrics.episodes import EpisodeMetrics, reported_means, summarise
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.types import Rollout, Sample, StopReason
from tests.metrics.rollouts import by_hand, of_envs
from tests.types.samples import action, prompt, turn

# turns:          A   B    C   D  E  F  G   H      ended: B, D, E
EXPECTED = {
    "rollout/reward_per_turn": (1 + 2 - 1 + 3 + 0 + 1 + 0 - 1) / 8,
    "rollout/valid_action_ratio": (1 + 1 + 0 + 1 + 1 + 1 + 1 + 0) / 8,
    "rollout/invented_action_ratio": 1 / 8,
    "rollout/token_cap_ratio": 1 / 8,
    "rollout/reply_tokens": (3 + 2 + 1 + 5 + 2 + 2 + 3 + 2) / 8,
    "rollout/prompt_tokens": (4 + 5 + 2 + 6 + 3 + 3 + (1 + 2) + 1) / 8,  # of F, G, H only what was new
    "rollout/history_cuts": 2 + 3,
    "rollout/episodes": 3,
    "rollout/success": (0 + 1 + 0) / 3,
    "rollout/return": (5 + 4 + 0) / 3,
    "rollout/episode_turns": (5 + 6 + 1) / 3,
    "rollout/truncated_ratio": (0 + 1 + 1) / 3,
    "stop/env_done": 1 / 3,
    "stop/env_truncated": 1 / 3,
    "stop/max_turns": 1 / 3,
    "stop/invalid_action": 0 / 3,
    "stop/context_length": 0 / 3,
    "stop/reply_budget": 0 / 3,
    "stop/env_fault": 0 / 3,
    "env/achievement/wood": (1 + 0 + 1) / 3,
    "env/progression": (0.75 + 0.25) / 2,  # E does not tell it
    "env/retries": 1 + 2,
    "env/errors/TimeoutError": 1 + 1,
    "env/errors/OSError": 1,
    "env/lost/died": 2,
    "time/env_to_generation": (0.5 + 0.25 + 0.25 + 1 + 0.5 + 0.5 + 0.75 + 0.25) / (1 + 2 + 1 + 3 + 1 + 2 + 1 + 5),
}


def computed(rollout: Rollout) -> dict[str, float]:
    return over_ranks(rollout_numbers(rollout))


def test_every_number_by_hand():
    assert computed(by_hand()) == pytest.approx(EXPECTED, rel=0, abs=1e-12)


def test_an_episode_that_tells_nan_or_an_infinity_does_not_count_for_that_number():
    end = {"terminated": True, "stop": StopReason.ENV_DONE, "success": True}
    reported = [
        {"seconds": 2.0, "progression": math.nan},
        {"seconds": math.inf},
        {"seconds": math.nan},
        {"seconds": 4.0},
    ]
    turns = [turn(env=env, metrics=metrics, **end) for env, metrics in enumerate(reported)]
    numbers = computed(Rollout.from_samples([Sample((prompt(1), action(2)), (one,)) for one in turns]))
    assert numbers["env/seconds"] == 3.0
    assert "env/progression" not in numbers
    results = [summarise([one]) for one in turns]
    assert over_ranks(reported_means(results)) == {"seconds": 3.0}
    metrics = EpisodeMetrics()
    metrics.update(results)
    assert metrics.compute()["progression"] == 1.0  # as of episodes that do not tell it: their success


def test_without_ended_episodes_there_are_no_shares_of_them():
    """Environment 2 only goes on: a gap in the curve of success, not a 0."""
    numbers = computed(of_envs(by_hand(), [2]))
    assert numbers["rollout/episodes"] == 0
    assert numbers["rollout/reward_per_turn"] == (1 + 0 - 1) / 3
    of_episodes = {"rollout/success", "rollout/return", "rollout/episode_turns", "rollout/truncated_ratio"}
    assert not numbers.keys() & of_episodes
    assert not [name for name in numbers if name.startswith("stop/")]
    assert [name for name in numbers if name.startswith("env/")] == [
        "env/errors/OSError",
        "env/errors/TimeoutError",
        "env/lost/died",
        "env/retries",
    ]


def test_without_seconds_of_the_engine_there_is_no_ratio_to_them():
    rollout = by_hand()
    samples = [replace(s, turns=tuple(replace(t, engine_seconds=0.0) for t in s.turns)) for s in rollout.samples]
    assert "time/env_to_generation" not in computed(Rollout.from_samples(samples))


@pytest.mark.parametrize(
    ("success", "total", "expected"),
    [(True, -1.0, True), (False, 1.0, False), (None, 1.0, True), (None, 0.0, False), (None, -1.0, False)],
)
def test_success_is_what_the_environment_says_else_a_positive_return(success, total, expected):
    assert turn(success=success, episode_return=total).succeeded is expected
    fault = {"truncated": True, "stop": StopReason.ENV_FAULT}
    assert not turn(success=success, episode_return=total, **fault).succeeded


def test_a_mean_of_nothing_is_left_out_and_a_sum_of_nothing_is_zero():
    numbers: dict[str, Number] = {"mean": Mean(0.0, 0.0), "sum": Sum(0.0), "other": Mean(3.0, 4.0)}
    assert over_ranks(numbers) == {"sum": 0.0, "other": 0.75}
