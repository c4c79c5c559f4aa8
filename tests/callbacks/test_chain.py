"""A Chain that is given to several runs from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.callbacks import Chain, chain
from lightning_agentrl.callbacks.chain import FOLDER, read_link, read_links
from lightning_agentrl.losses import TruncatedWeights
from tests.agents.harness import make_agent, make_data, make_trainer


class FailingUpdate(PPOAgent):
    """An agent whose rollout is seen and whose update fails."""

    def policy_loss(self, *args: Any) -> Any:
        raise RuntimeError("no loss")


@pytest.mark.slow
def test_a_run_holds_nothing_of_a_rollout_whose_update_failed_in_the_run_before(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """The first run weights tokens, the second does not."""
    chain = Chain()
    with pytest.raises(RuntimeError, match="no loss"):
        make_trainer(tmp_path, 1, [chain]).fit(
            FailingUpdate(str(tiny_folder), correction=TruncatedWeights()), make_data()
        )
    make_trainer(tmp_path, 1, [chain]).fit(make_agent(tiny_folder), make_data())
    fields = read_link(read_links(tmp_path / FOLDER)[1][0])
    assert "scores/token/advantages" in fields
    assert "scores/token/weights" not in fields


def test_a_file_that_its_run_has_removed_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"000001-rank0\.npz' is gone"):
        chain.read_link(chain.link_path(tmp_path, 1, 0))
