"""Two processes say of their parts together what one says of the whole, and both say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.metrics.episodes import EpisodeResult
from tests.metrics import two_ranks
from tests.metrics.two_ranks import SPLITS, describe_part
from tests.started import together

pytestmark = pytest.mark.slow  # two processes


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes says."""
    folder = tmp_path_factory.mktemp("ranks")
    together(2, two_ranks.run, str(folder))
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", SPLITS)
def test_two_processes_describe_a_rollout_like_one(reports, name):
    split = SPLITS[name]
    one = describe_part(split, [*split.first, *split.second])
    for process in reports:
        two = process["parts"][name]
        assert two["describe"] == pytest.approx(one["describe"], rel=0, abs=1e-12)
        assert two["windows"] == one["windows"]
        assert two["state"] == json.loads(json.dumps(one["state"]))


def test_the_splits_have_names_that_only_one_process_knows(reports):
    """Else the test above would say nothing about them."""
    split = SPLITS["episodes end in one process only"]
    first, second = (describe_part(split, envs)["describe"].keys() for envs in (split.first, split.second))
    assert {"rollout/success", "env/progression", "env/achievement/wood", "stop/env_done"} <= first - second
    assert "env/errors/OSError" in second - first
    split = SPLITS["thoughts are in one process only"]
    first, second = (describe_part(split, envs)["describe"].keys() for envs in (split.first, split.second))
    assert {"kl/thought", "text/thought_copies", "text/thought_diversity"} <= second - first


def test_times_are_means_and_rates_are_of_all_processes_together(reports):
    expected = {
        "time/iteration_seconds": (6 + 9) / 2,
        "time/collect_seconds": (2 + 4) / 2,
        "time/collect_turns_per_second": (8 + 8) / 3,
        "time/collect_tokens_per_second": (80 + 100) / 3,
        "time/update_seconds": (4 + 2) / 2,
        "time/update_turns_per_second": (6 + 10) / 3,
        "time/update_tokens_per_second": (70 + 110) / 3,
        "time/validate_seconds": 3,  # mean of those processes that validated
        "time/collect_to_update": (2 + 4) / (4 + 2),
    }
    for process in reports:
        assert process["times"] == pytest.approx(expected, rel=0, abs=1e-12)


def test_held_out_episodes_of_one_process_only(reports):
    one = two_ranks.held_out([EpisodeResult(True, 3.0, 2, 2), EpisodeResult(False, -1.0, 5, 3)])
    assert one["episodes"] == 2
    for process in reports:
        assert process["held_out"] == pytest.approx(one, rel=0, abs=1e-12)


def test_errors_of_returns_far_from_0_are_those_of_one_process(reports):
    one = two_ranks.held_out(two_ranks.FAR)
    assert one["return_error"] == pytest.approx(0.75 * 0.5**0.5)  # variance of 0 to 4 is 2.5, over 5 episodes
    for process in reports:
        assert process["far"] == pytest.approx(one, rel=1e-12)
