"""Reading models at the action tokens of a rollout, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.models.critic import Critic
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.packing import Packed, Row, pack, plan_micro_batches
from lightning_agentrl.types import Rollout, Scores, flatten_ids


@dataclass(frozen=True)
class Reader:
    """How models are read: sampling temperature, tokens of one micro-batch, device."""

    temperature: float
    max_tokens: int
    device: torch.device

    def micro_batches(self, rows: Sequence[Row]) -> list[list[int]]:
        return plan_micro_batches(rows, self.max_tokens)

    def pack(self, rows: Sequence[Row]) -> Packed:
        return pack(rows, self.device)


def action_rows(rollout: Rollout) -> list[Row]:
    """One row per sample, read before each of its action tokens."""
    return [Row(tuple(s.ids), tuple(p - 1 for p in s.action_positions)) for s in rollout.samples]


def bootstrap_rows(rollout: Rollout) -> dict[int, Row]:
    """Rows of the states after those samples where the recursion is cut, read at their last token."""
    rows = {}
    for i in torch.nonzero(rollout.last_of_trajectory).flatten().tolist():
        following = rollout.samples[i].turns[-1].bootstrap
        if following is not None:
            ids = tuple(flatten_ids(following))
            rows[i] = Row(ids, (len(ids) - 1,))
    return rows


def to_columns(flat_R: Tensor, mask_BA: Tensor) -> Tensor:
    """[B, A] with the read-outs at the action tokens and 0 elsewhere."""
    columns = flat_R.new_zeros(mask_BA.shape)
    return columns.masked_scatter(mask_BA.to(flat_R.device), flat_R)


@torch.no_grad()
def score_policy(policy: LanguageModel, rollout: Rollout, reader: Reader) -> Scores:
    """Log-probs, entropy and sum of squared probabilities of every action token, each [B, A] on the CPU."""
    rows = action_rows(rollout)
    parts = []
    for index in reader.micro_batches(rows):
        packed = reader.pack([rows[i] for i in index])
        scores = policy.token_scores(policy.hidden(packed), packed.targets, reader.temperature)
        parts.append((index, (scores.logps, scores.entropy, scores.sum_pi_squared)))
    logps, entropy, sum_pi_squared = _collect(parts, rollout, count=3)
    return Scores(old_logps=logps, entropy=entropy, sum_pi_squared=sum_pi_squared)


@torch.no_grad()
def score_values(policy: LanguageModel, critic: Critic, rollout: Rollout, reader: Reader) -> tuple[Tensor, Tensor]:
    """Values [B, A] at the action tokens, and bootstrap values [B] of the states after the samples, 0 where no cut."""
    rows = action_rows(rollout)
    extra = bootstrap_rows(rollout)
    owners = list(extra)
    everything = [*rows, *extra.values()]
    parts = []
    bootstrap_values = torch.zeros(len(rollout))
    for index in reader.micro_batches(everything):
        packed = reader.pack([everything[i] for i in index])
        values = critic(packed, policy.hidden(packed) if critic.shares_trunk else None)
        by_row = values.cpu().split([len(everything[i].reads) for i in index])
        own = [(i, value) for i, value in zip(index, by_row, strict=True) if i < len(rows)]
        if own:
            parts.append(([i for i, _ in own], (torch.cat([value for _, value in own]),)))
        for i, value in zip(index, by_row, strict=True):
            if i >= len(rows):
                bootstrap_values = bootstrap_values.to(value.dtype)
                bootstrap_values[owners[i - len(rows)]] = value[0]
    (values_BA,) = _collect(parts, rollout, count=1)
    return values_BA, bootstrap_values.to(values_BA.dtype)


def _collect(
    parts: Sequence[tuple[list[int], tuple[Tensor, ...]]], rollout: Rollout, count: int
) -> list[Tensor]:
    columns: list[Tensor | None] = [None] * count
    for index, flats in parts:
        mask = rollout.action_mask[index]
        for k, flat in enumerate(flats):
            flat = flat.detach().cpu()
            out = columns[k]
            if out is None:
                out = columns[k] = flat.new_zeros(rollout.action_mask.shape)
            out[index] = to_columns(flat, mask)
    return [rollout.rewards.new_zeros(rollout.action_mask.shape) if c is None else c for c in columns]
