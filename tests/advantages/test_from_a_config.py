"""Estimators by their short names, and what an agent makes for them."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentParser

from lightning_agentrl import advantages
from lightning_agentrl.advantages import AdvantageEstimator
from lightning_agentrl.agents import PPOAgent
from tests.advantages.test_conformance import CLASSES, called


@pytest.mark.parametrize("cls", CLASSES, ids=called)
def test_a_short_name_is_enough(cls: type[AdvantageEstimator]):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--advantage", type=AdvantageEstimator)
    for given in (f"{{class_path: {cls.__name__}}}", f"{{class_path: {cls.__name__}, init_args: {{whiten: true}}}}"):
        made = parser.instantiate(parser.parse_args([f"--advantage={given}"])).advantage
        assert type(made) is cls
    assert made.whiten is True
    assert getattr(advantages, cls.__name__) is cls
    assert cls.__name__ in advantages.__all__


@pytest.mark.parametrize("cls", CLASSES, ids=called)
def test_an_agent_computes_what_its_estimator_declares(cls: type[AdvantageEstimator]):
    agent = PPOAgent("demo", advantage=cls())
    assert agent.needs.sum_pi_squared is cls.needs_sum_pi_squared
    assert (agent.critic is not None) is cls.needs_values
