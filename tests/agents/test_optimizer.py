"""The optimizer and what it steps on."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_agentrl.agents import Optim, PPOAgent
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from tests.agents.harness import make_agent, make_data, make_trainer

NAN, INF = math.nan, math.inf


class WithMore(PPOAgent):
    """Has a layer of its own."""

    steps_on_it = False

    def configure_model(self) -> None:
        super().configure_model()
        self.more = nn.Linear(2, 1)

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        if self.steps_on_it:
            made["optimizer"].param_groups[0]["params"] += self.steps.masters.of(self.more.parameters())
        return made


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


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        *(
            (name, value, "at least 0")
            for name in ("lr_actor", "lr_critic", "weight_decay")
            for value in (-1e-9, INF, NAN)
        ),
        *((f"max_grad_norm_{group}", value, "above 0") for group in ("actor", "critic") for value in (0.0, NAN)),
        ("max_not_finite", 0, "at least 1"),
    ],
)
def test_settings_of_the_optimizer_out_of_range_are_refused(name: str, value: float, needed: str) -> None:
    with pytest.raises(ValueError, match=f"^model.init_args.optim.{name} must be {needed}, got {value}"):
        Optim(**{name: value})


def test_what_holds_still_is_allowed() -> None:
    Optim(lr_actor=0.0, lr_critic=0.0, weight_decay=0.0, max_grad_norm_actor=INF, max_not_finite=1)
