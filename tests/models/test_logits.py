"""What is made of the logits: Σπ² of the distribution that gives the log-probs, and memory for one chunk of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_agentrl.models import language_model
from lightning_agentrl.models.language_model import LanguageModel, TokenScores
from lightning_agentrl.models.loading import load_causal_lm

CHUNK, CHUNKS = 64, 16
NAMES = ("logps", "entropy", "sum_pi_squared")


class Peak(TorchDispatchMode):
    """The most bytes that were in the memory of tensors made inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._alive[x.untyped_storage()] = x.untyped_storage().nbytes()
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return result


@pytest.fixture(params=[True, False], ids=["recomputed", "kept"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    monkeypatch.setattr(language_model, "LOGITS_PER_CHUNK", CHUNK)
    return LanguageModel(load_causal_lm(str(tiny_folder)).double(), request.param)


def inputs(policy: LanguageModel) -> tuple[Tensor, Tensor]:
    """Hidden states, and tokens of which one lies outside of any row."""
    hidden_RH = torch.randn(CHUNK * CHUNKS, policy.hidden_size, dtype=torch.float64, requires_grad=True)
    targets_R = torch.randint(100, (CHUNK * CHUNKS,))
    targets_R[3] = -1
    return hidden_RH, targets_R


def total(scores: TokenScores) -> Tensor:
    """A sum in which every number has another weight."""
    numbers = torch.stack([getattr(scores, name) for name in NAMES])
    return (numbers * torch.linspace(-1, 2, numbers.numel(), dtype=torch.float64).view_as(numbers)).sum()


def test_numbers_and_gradients_do_not_depend_on_what_is_kept(policy: LanguageModel) -> None:
    """Log-prob, entropy and Σπ² of the logits after temperature, S = exp(logsumexp 2z - 2 logsumexp z)."""
    hidden_RH, targets_R = inputs(policy)
    z_RV = policy.lm.get_output_embeddings()(hidden_RH) / 0.7
    log_pi_RV = z_RV.log_softmax(-1)
    want = TokenScores(
        log_pi_RV.gather(1, targets_R.clamp_min(0)[:, None])[:, 0],
        -(log_pi_RV.exp() * log_pi_RV).sum(1),
        (torch.logsumexp(2 * z_RV, 1) - 2 * torch.logsumexp(z_RV, 1)).exp(),
    )
    got = policy.token_scores(hidden_RH, targets_R, 0.7, sum_pi_squared=True)
    for name in NAMES:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-10)
    leaves = [hidden_RH, *policy.lm.get_output_embeddings().parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(total(x), leaves) for x in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_one_chunk_of_logits_is_in_memory_and_not_all(policy: LanguageModel) -> None:
    """Everything together takes less than the logits of all chunks would, unless they are kept."""
    hidden_RH, targets_R = inputs(policy)
    logits = CHUNKS * CHUNK * policy.lm.config.vocab_size * 8
    with Peak() as update:
        total(policy.token_scores(hidden_RH, targets_R, 1.0, sum_pi_squared=True)).backward()
    with torch.no_grad(), Peak() as scoring:
        policy.token_scores(hidden_RH, targets_R, 1.0, sum_pi_squared=True)
    assert logits / CHUNKS < scoring.bytes < logits
    if policy.recompute_logits:
        assert logits / CHUNKS < update.bytes < logits
    else:
        assert update.bytes > 2 * logits


def test_logits_of_a_single_chunk_are_not_computed_twice(policy: LanguageModel) -> None:
    hidden_RH, targets_R = inputs(policy)
    calls: list[int] = []
    policy.lm.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    policy.token_scores(hidden_RH[:CHUNK], targets_R[:CHUNK], 1.0).logps.sum().backward()
    assert len(calls) == 1
    policy.token_scores(hidden_RH, targets_R, 1.0).logps.sum().backward()
    assert len(calls) == 1 + (2 * CHUNKS if policy.recompute_logits else CHUNKS)
