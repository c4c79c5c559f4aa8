"""Runs of families whose layers pass states on or have sinks: trained as they sampled, and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_agentrl.agents import Optim
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout import EnvConfig, PromptFormat, WindowMemory
from tests.agents.harness import Keeping, make_data, make_trainer
from tests.models.test_families import tiny_config
from tests.tiny import tiny_tokenizer, tiny_vision_folder


def folder_of(family: str, path: Path) -> Path:
    if family == "qwen3_5":
        return tiny_vision_folder(path, "qwen3_5")
    tokenizer, config = tiny_tokenizer(), tiny_config(family)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 2048
    for name in ("bos", "eos", "pad"):
        setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text", "gpt_oss", "nemotron_h"])
def test_a_family_is_trained_and_resumed(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    settings: dict[str, Any] = {"memory": WindowMemory(1)}
    if family == "qwen3_5":
        settings |= {
            "env": EnvConfig("tests.seen_game:Corner-v0"),
            "prompt": PromptFormat(think=False, max_prompt_tokens=400),
        }
    optim = Optim(lr_actor=1e-3, lr_critic=1e-3)
    whole, first, again = (Keeping(str(folder), critic=SeparateCritic(), optim=optim) for _ in range(3))

    def trainer_of(iterations: int) -> L.Trainer:
        return make_trainer(tmp_path, iterations, precision="32-true")  # experts take no float64

    trainer_of(2).fit(whole, make_data(**settings))
    for rollout in whole.rollouts:
        assert rollout.scores.old_logps is not None
        ours, engines = rollout.scores.old_logps[rollout.action_mask], rollout.rollout_logps[rollout.action_mask]
        torch.testing.assert_close(ours, engines.to(ours.dtype), atol=1e-4, rtol=0)
    trainer = trainer_of(1)
    trainer.fit(first, make_data(**settings))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer_of(2).fit(again, make_data(**settings), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    resumed, before = dict(again.named_parameters()), dict(first.named_parameters())
    for name, x in whole.named_parameters():
        assert torch.equal(x, resumed[name]), name
    assert any(not torch.equal(x, before[name]) for name, x in whole.named_parameters())
