"""Mutual information of prompts and thoughts, by hand and of a model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_agentrl.agents.scoring import Reader
from lightning_agentrl.callbacks.thought_information import cross_logps, mutual_information
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.types import ModelInput


def test_thoughts_that_fit_one_prompt_alone_tell_all_and_phrases_tell_nothing():
    apart = torch.full((5, 5), -200.0).fill_diagonal_(-3.0)
    assert mutual_information(apart) == (pytest.approx(math.log(5)), 1.0)
    assert mutual_information(torch.randn(5, 1).expand(5, 5)) == (pytest.approx(0.0, abs=1e-12), 0.0)


def test_numbers_by_hand():
    """The first thought is twice as likely after its own prompt: log(2 / 1.5); the second as half: log(.5 / .75)."""
    logps = torch.tensor([[math.log(0.2), math.log(0.1)], [math.log(0.4), math.log(0.2)]])
    information, own = mutual_information(logps)
    assert information == pytest.approx((math.log(2 / 1.5) + math.log(0.5 / 0.75)) / 2)
    assert own == 0.5


@torch.no_grad()
def test_each_thought_is_scored_after_each_prompt(tiny_folder: Path):
    policy = LanguageModel(load_causal_lm(str(tiny_folder)))
    pairs = [(ModelInput.of_ids((1, 5, 9)), (33, 70)), (ModelInput.of_ids((1, 5, 12, 8)), (33,))]
    got = cross_logps(policy, pairs, Reader(1.0, 64, torch.device("cpu"), share=True))
    for i, (_, thought) in enumerate(pairs):
        for j, (prompt, _) in enumerate(pairs):
            ids = torch.tensor([[*prompt.ids, *thought]])
            log_pi = load_causal_lm(str(tiny_folder))(ids).logits.log_softmax(-1)[0]
            want = sum(log_pi[len(prompt) - 1 + k, one] for k, one in enumerate(thought))
            assert got[i, j].item() == pytest.approx(float(want), abs=1e-4)
