"""End to end: environment, prompt, engine, advantages, losses and optimizer together make a policy better."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import EnvConfig, PromptFormat, TurnInteraction, WindowMemory
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.tiny import CHATML, END, PAD, START

WORDS = [PAD, START, END, "?", "system", "user", "assistant", "Weather", "sun", "rain", "snow"]
ARMS = ["hat", "umbrella", "gloves"]


@pytest.fixture(scope="module")
def bandit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose vocabulary is the words of the bandit, so that one reply in five names an arm."""
    path = tmp_path_factory.mktemp("bandit")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS + ARMS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=START, eos_token=END, pad_token=PAD, unk_token="?", chat_template=CHATML
    )
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, eos_token_id=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


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
