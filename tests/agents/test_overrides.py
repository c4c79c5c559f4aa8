"""Hooks of Lightning that a subclass of an agent overrides: none leaves out the agent's own."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.agents import Agent, PPOAgent
from lightning_agentrl.agents.overrides import HOOKS
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.critic import SharedCritic
from tests.agents.harness import make_data, make_trainer


def silent(self: Any, *args: Any) -> None:
    """What Lightning's documentation shows: its own hooks do nothing, so nobody calls them."""


def announced(method: Any) -> Any:
    @wraps(method)
    def announcing(self: Any, *args: Any) -> None:
        method(self, *args)

    return announcing


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_leaves_out_that_of_the_agent_is_refused_by_name(hook: str) -> None:
    assert hook in vars(Agent)
    for method in (silent, announced(silent)):
        with pytest.raises(ConfigError, match=rf"{hook} of Mute .*super\(\)\.{hook}"):
            type("Heir", (type("Mute", (PPOAgent,), {hook: method}),), {})("model")


class Calling(PPOAgent):
    """Calls those of the agent in the ways that there are."""

    @announced
    def on_train_start(self) -> None:
        super().on_train_start()

    def on_train_epoch_start(self) -> None:
        PPOAgent.on_train_epoch_start(self)

    def on_train_epoch_end(self) -> None:
        for end in [lambda: super(Calling, self).on_train_epoch_end()]:
            end()


@pytest.mark.slow
def test_hooks_that_call_those_of_the_agent_run_in_a_fit(tmp_path: Path, exact_folder: Path) -> None:
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(Calling(str(exact_folder), critic=SharedCritic()), make_data())
    assert "time/iteration_seconds" in trainer.callback_metrics
