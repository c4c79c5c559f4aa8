"""The optimizer and what it steps on."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from tests.agents.harness import make_agent, make_data, make_trainer


class WithMore(PPOAgent):
    """Has a layer of its own."""

    steps_on_it = False

    def configure_model(self) -> None:
        super().configure_model()
        self.more = nn.Linear(2, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        if self.steps_on_it:
            optimizer.param_groups[0]["params"] += self.masters.of(self.more.parameters())
        return optimizer


@pytest.mark.slow
def test_parameters_that_the_optimizer_leaves_out_are_told(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^2 of the agent's parameters are in no group .* such as more\.weight"):
        make_trainer(tmp_path, 1).fit(WithMore(str(tiny_folder)), make_data())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.slow
def test_nothing_is_told_where_all_are_stepped_on(tiny_folder: Path, tmp_path: Path, precision: str) -> None:
    taught = WithMore(str(tiny_folder))
    taught.steps_on_it = True
    for number, agent in enumerate(
        (taught, make_agent(tiny_folder, SharedCritic()), make_agent(tiny_folder, SeparateCritic()))
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*in no group")
            make_trainer(tmp_path / str(number), 1, precision=precision).fit(agent, make_data())
