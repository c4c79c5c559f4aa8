"""A RunSummary that is given to several runs from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_agentrl.callbacks import RunSummary
from lightning_agentrl.rollout import ValidationConfig
from tests.agents.harness import make_agent, make_data, make_trainer


@pytest.mark.slow
def test_the_summary_of_a_second_run_holds_what_was_played_before_that_one_and_its_own_minutes(
    tmp_path: Path, tiny_folder: Path
) -> None:
    summary, summaries = RunSummary(), []
    summary.load_state_dict({"before": {"episodes": 99}, "minutes": 600.0})  # as of a run that was continued
    for episodes in (4, 8):
        data = make_data(validation=ValidationConfig(episodes=episodes, num_envs=4))
        make_trainer(tmp_path, 1, [summary]).fit(make_agent(tiny_folder), data)
        summaries.append(json.loads((tmp_path / "summary.json").read_text()))
    assert [one["before"]["episodes"] for one in summaries] == [one["after"]["episodes"] for one in summaries] == [4, 8]
    assert all(one["minutes"] < 10 for one in summaries)
