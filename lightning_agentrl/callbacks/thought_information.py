"""Mutual information between thoughts and their prompts, as a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import Reader, evaluation_mode, row_scores
from lightning_agentrl.distributed import Mean, over_ranks
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.types import ModelInput, Rollout, Row, input_of

COMPARED = 16  # number of thoughts to compare on each process


class ThoughtInformation(RolloutCallback):
    """Log the mutual information of prompts and thoughts, which falls to 0 if all prompts get the same thought.

    Each thought in a sample of the rollout's thoughts is scored after every prompt in the sample; common prefixes are
    computed once. Entropy does not detect this collapse, since one thought can be worded in many ways.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        pairs = thoughts_of(rollout)
        step = max(len(pairs) / COMPARED, 1.0)
        picked = [pairs[int(k * step)] for k in range(min(COMPARED, len(pairs)))]
        with evaluation_mode(agent):
            logps = cross_logps(agent.actor, picked, replace(agent.reader, advance=lambda count: None))
        weight = len(picked) if len(picked) > 1 else 0
        information, found = mutual_information(logps) if weight else (0.0, 0.0)
        numbers = {"thoughts/information": information, "thoughts/told_apart": found}
        means = {name: Mean(weight * value, weight) for name, value in numbers.items()}
        self._numbers = over_ranks(means)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._numbers:
            pl_module.log_dict(self._numbers, on_step=False, on_epoch=True, batch_size=1)
            self._numbers = {}


def thoughts_of(rollout: Rollout) -> list[tuple[ModelInput, tuple[int, ...]]]:
    """Return the prompt of the last turn of each sample and the ids of the thought, if the turn has a thought."""
    found = []
    for sample in rollout.samples:
        count = sample.turns[-1].thought_tokens
        if count:
            found.append((input_of(sample.segments[:-1]), sample.segments[-1].ids[:count]))
    return found


def cross_logps(policy: LanguageModel, pairs: Sequence[tuple[ModelInput, tuple[int, ...]]], reader: Reader) -> Tensor:
    """Return log-probs [N, N] of each thought (rows) after each prompt (columns)."""
    rows = [
        Row(prompt + ModelInput.of_ids(thought), tuple(range(len(prompt) - 1, len(prompt) + len(thought) - 1)))
        for _, thought in pairs
        for prompt, _ in pairs
    ]
    sums = [logps.double().sum() for logps, _ in row_scores(policy, rows, reader)]
    return torch.stack(sums).view(len(pairs), len(pairs)) if sums else torch.zeros(0, 0, dtype=torch.float64)


def mutual_information(logps_NN: Tensor) -> tuple[float, float]:
    """Estimate the mutual information between N thoughts and their prompts (arXiv 2604.06268).

    Args:
        logps_NN: log-prob of the i-th thought after the j-th prompt; the thought's own prompt has j = i.

    Returns:
        The mutual information in nats, ``mean_i(logp_ii - log mean_j exp(logp_ij))``, at most log N; and the fraction
        of thoughts that are more likely after their own prompt than after any other, 1 / N by chance.
    """
    logps_NN = logps_NN.double()
    count = len(logps_NN)
    own_N = logps_NN.diagonal()
    marginal_N = torch.logsumexp(logps_NN, 1) - math.log(count)
    others_N = logps_NN.masked_fill(torch.eye(count, dtype=torch.bool), -math.inf).amax(1)
    return float((own_N - marginal_N).mean()), float((own_N > others_N).double().mean())
