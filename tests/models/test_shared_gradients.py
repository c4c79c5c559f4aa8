"""In float32, gradients of a packed row are those of the rows by themselves: the demo model and two other families."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from lightning_agentrl.models.attention.tree import TREE
from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import DEMO, load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import Row
from tests.inputs import text_row
from tests.tiny import small_model


def make(family: Literal["demo", "qwen2", "qwen3"]) -> PreTrainedModel:
    if family == "demo":
        return load_causal_lm(DEMO)
    return small_model(family, vocab_size=5000, attn_implementation=TREE)


def turns(shared: int, own: int, count: int, words: int) -> list[Row]:
    draw = random.Random(0)
    prefix = draw.choices(range(words), k=shared)
    return [
        text_row((*prefix, *draw.choices(range(words), k=own)), tuple(range(shared + own - 9, shared + own - 1)))
        for _ in range(count)
    ]


def gradient(lm: PreTrainedModel, packs: list[list[Row]]) -> torch.Tensor:
    """Of the mean log-prob and entropy, added up over forward passes."""
    policy = LanguageModel(lm)
    policy.zero_grad()
    for rows in packs:
        row = pack(rows, lm.device)
        scores = policy.token_scores(policy.hidden(row), row.targets, 1.0)
        (scores.logps.sum() + 0.1 * scores.entropy.sum()).div(100).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["demo", "qwen2", "qwen3"])
def test_shared_equals_unshared_on_a_gpu(family, checkpointing):
    """By FlexAttention's kernels."""
    lm = make(family).train().cuda()
    rows = turns(200, 60, 6, 5000)
    apart = gradient(lm, [[row] for row in rows])
    if checkpointing:
        checkpoint_activations(lm)
    together = gradient(lm, [rows])
    assert float((together - apart).norm() / apart.norm()) < 1e-4
