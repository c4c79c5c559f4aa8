"""Classes of a user's own that refuse to be made, or save what they were made with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.errors.foreign_messages import TRIED
from lightning_agentrl.rollout import WindowMemory
from tests.cli import Command, Config, changed, sentence


class Silent(WindowMemory):
    """Says nothing of why it cannot be made."""

    def __init__(self, turns: int = 1) -> None:
        raise ValueError


def test_one_that_says_nothing_is_named_with_its_error_and_line(agentrl: Command, config: Config) -> None:
    own = {"class_path": "tests.commands.test_constructors.Silent", "init_args": {"turns": 2}}
    message = sentence(agentrl(config=changed(config, "data.init_args.memory", own)))
    for part in ("ValueError without a message", "test_constructors.py, line 22", "data.init_args.memory"):
        assert part in message


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="about its absence")
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", {"class_path": "DeepSpeedStrategy"}], ids=["word", "class"])
def test_missing_deepspeed_is_to_be_installed_in_a_tried_version(
    strategy: Any, agentrl: Command, config: Config
) -> None:
    message = sentence(agentrl(config=changed(config, "trainer.strategy", strategy)))
    assert 'pip install "lightning-agentrl[deepspeed]"' in message
    assert "pip install -U" not in message
    assert "DeepSpeedStrategy" in message


@pytest.mark.parametrize("package", TRIED)
def test_an_extra_has_the_tried_versions_of_a_package(package: str) -> None:
    assert package in importlib.metadata.metadata("lightning-agentrl").get_all("Provides-Extra", [])


class Compared(Exception):
    """The keys of a config as plain data: ours, and as Lightning makes them."""


class Comparing(AgentCLI):
    def instantiate_classes(self) -> None:
        self._dump_config()
        ours: Any = self.config_dump
        del self.config_dump
        LightningCLI._dump_config(self)
        raise Compared(ours, self.config_dump)


def test_what_a_module_can_save_is_what_lightning_would_have_it_save() -> None:
    with pytest.raises(Compared) as compared:
        Comparing(["fit", "--config", "quickstart", "--model.init_args.optim.max_grad_norm_actor", ".inf"])
    ours, lightnings = compared.value.args
    assert ours == lightnings
    assert ours["model"]["init_args"]["optim"]["max_grad_norm_actor"] == float("inf")
