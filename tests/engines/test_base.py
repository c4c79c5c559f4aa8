"""What an engine is told of the trainer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lightning_agentrl.engines import PlannedPolicy, PolicyHandle, VLLMEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm


@pytest.fixture
def policy(tiny_folder: Path) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(tiny_folder)))


def mixed() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_it_is_told_what_the_trainer_computes_in(policy: LanguageModel) -> None:
    assert PolicyHandle(policy, (), nullcontext).computes_in == torch.float32
    assert PolicyHandle(policy, (), mixed).computes_in == torch.bfloat16
    policy.lm.to(torch.bfloat16)
    assert PolicyHandle(policy, (), nullcontext).computes_in == torch.bfloat16


def test_vllm_computes_in_what_the_trainer_does_unless_told_otherwise(policy: LanguageModel) -> None:
    """As the bytes of its weights tell."""
    count = sum(p.numel() for p in policy.lm.parameters())

    def width(engine: VLLMEngine, dtype: torch.dtype) -> float:
        return (engine.memory(PlannedPolicy(policy, False, dtype, 64), 1).resident - 2**30) / count

    assert width(VLLMEngine(), torch.float32) == 4
    assert width(VLLMEngine(), torch.bfloat16) == 2
    assert width(VLLMEngine("float32"), torch.bfloat16) == 4
    with pytest.raises(ValueError, match=r"trainer.precision.*32"):
        width(VLLMEngine(), torch.float64)
