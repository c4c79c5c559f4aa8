"""End to end: environment, prompt, engine, advantages, losses and optimizer together make a policy better."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest

from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import EnvConfig, PromptFormat, TurnInteraction, WindowMemory
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.tiny import word_model_folder

WORDS = ("Weather", "sun", "rain", "snow", "hat", "umbrella", "gloves")


@pytest.fixture(scope="module")
def bandit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose vocabulary is the words of the bandit, so that one reply in five names an arm."""
    return word_model_folder(tmp_path_factory.mktemp("bandit"), WORDS)


@pytest.mark.parametrize("critic", [SharedCritic, SeparateCritic])
def test_ppo_solves_a_contextual_bandit(tmp_path, bandit_folder, critic):
    """Chance is a third of valid replies and no context; nine tenths need the word in the observation."""
    success: list[float] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, agent, batch, batch_idx):
            turns = batch.rollout.turns
            success.append(sum(bool(turn.success) for turn in turns) / len(turns))

    agent = make_agent(
        bandit_folder, critic(), kl_in_reward=0.0, lr_actor=5e-3, lr_critic=5e-3, advantage=DualDiscountGAE()
    )
    data = make_data(
        env=EnvConfig("agentrl_envs:Bandit-v0"),
        num_envs=32,
        turns_per_env=2,
        mini_batch_turns=32,
        memory=WindowMemory(0),
        prompt=PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=64),
        interaction=TurnInteraction(max_reply_tokens=1),
    )
    make_trainer(tmp_path, 40, [Keep()], precision="32-true").fit(agent, data)
    assert sum(success[:2]) / 2 < 0.4
    assert sum(success[-6:]) / 6 >= 0.9
