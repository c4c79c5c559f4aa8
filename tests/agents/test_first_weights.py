"""A run begins with the same weights whatever the global generators of random numbers are set to meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_agentrl.models.critic import Critic, SeparateCritic, SharedCritic
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout import EnvConfig, RawParser, TurnInteraction
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.rollout.scripted import FREE_TEXT, Varied


class Seeding(Varied):
    """Seeds the global generators in each reset, if asked to."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.given = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self.given is not None:
            torch.manual_seed(self.given)
            np.random.seed(self.given)
            random.seed(self.given)
        return super().reset(seed=seed, options=options)


gymnasium.register("Seeding-v0", Seeding)


class RandomHead(SharedCritic):
    """A critic of a user's, whose head begins with random weights."""

    def build(self, actor_hidden_size: int, load: Any) -> None:
        super().build(actor_hidden_size, load)
        nn.init.normal_(self.head.linear.weight)


class FirstWeights(L.Callback):
    def on_train_start(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in agent.named_parameters()}


def run(path: Path, folder: Path, seed: int | None, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return first weights, and the metrics of the first iteration."""
    first = FirstWeights()
    data = make_data(
        env=EnvConfig("Seeding-v0", {"seed": seed}, worker="thread"),
        prompt=FREE_TEXT,
        interaction=TurnInteraction(4, RawParser()),
    )
    L.seed_everything(3)
    trainer = make_trainer(path, 1, [first])
    trainer.fit(make_agent(folder, **settings), data)
    metrics = {name: float(value) for name, value in trainer.logged_metrics.items() if not name.startswith("time/")}
    return first.weights, metrics


@pytest.mark.parametrize(
    ("critic", "lora"),
    [
        (SharedCritic, LoRA(rank=2)),
        pytest.param(SeparateCritic, LoRA(rank=2, dropout=0.2), marks=pytest.mark.slow),
        pytest.param(SeparateCritic, None, marks=pytest.mark.slow),
        (RandomHead, None),
    ],
)
def test_an_environment_that_seeds_the_generators_changes_no_weights(
    critic: type[Critic], lora: LoRA | None, tmp_path: Path, tiny_folder: Path
) -> None:
    (plain, measured), (weights, metrics) = (
        run(tmp_path, tiny_folder, seed, critic=critic(), lora=lora) for seed in (None, 0)
    )
    assert [name for name in plain if not torch.equal(plain[name], weights[name])] == []
    assert metrics == measured
