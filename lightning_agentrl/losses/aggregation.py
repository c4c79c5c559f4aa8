"""Aggregation of losses per token into one number, the first tokens of turns, and the weights of tokens in a reply."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Gather, alone

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` where the mask (same shape) is set, a scalar in float32 or better; values off the mask are not read.

    Raises:
        ValueError: shapes differ.
    """
    return _masked(x, mask).sum()


def check_aggregation(mode: str, norm_tokens: int | None) -> None:
    """Raise a ValueError for an unknown mode, or if ``norm_tokens`` is missing or given without its mode."""
    if mode not in get_args(AggregationMode):
        raise ValueError(f"aggregation must be one of {', '.join(get_args(AggregationMode))}, got '{mode}'")
    if (mode == "seq-mean-token-sum-norm") != (norm_tokens is not None):
        raise ValueError(
            "norm_tokens goes with aggregation seq-mean-token-sum-norm and with no other, "
            f"got {norm_tokens} with {mode}"
        )
    if norm_tokens is not None and norm_tokens < 1:
        raise ValueError(f"norm_tokens must be at least 1, got {norm_tokens}")


@torch.no_grad()
def row_weights(
    mask_BT: Tensor,
    mode: AggregationMode = "token-mean",
    *,
    norm_tokens: int | None = None,
    groups_B: Tensor | None = None,
    gather: Gather = alone,
) -> Tensor:
    """Return the weight [B] (float64) of each row's tokens in the mean over a mini-batch.

    With N tokens, R rows that have any, and K of a row: ``token-mean`` 1 / N, ``token-sum`` 1, ``seq-mean-token-sum``
    1 / R, ``seq-mean-token-mean`` 1 / (R K), ``seq-mean-token-sum-norm`` 1 / (R ``norm_tokens``), and ``prompt-mean``
    1 / (G N_g) with G groups of N_g tokens each. Weights are computed from the whole mini-batch, so how it is
    split into micro-batches changes nothing.

    Args:
        mask_BT: tokens that count, for all rows of the mini-batch on this rank.
        mode: what the mean is taken over.
        norm_tokens: constant length by which seq-mean-token-sum-norm divides.
        groups_B: labels of the groups, for prompt-mean.
        gather: returns the tensors of all ranks.

    Raises:
        ValueError: unknown mode, or something it needs is missing.
    """
    check_aggregation(mode, norm_tokens)
    count_B = mask_BT.bool().sum(1)
    if mode == "prompt-mean":
        assert groups_B is not None
        return 1 / _group_totals(groups_B, count_B, gather)
    counts = gather(torch.stack([count_B.sum(), (count_B > 0).sum()]))
    tokens, rows = torch.stack([*counts]).sum(0).clamp_min(1).tolist()
    if mode == "seq-mean-token-mean":
        return 1 / (rows * count_B.clamp_min(1).double())
    divisor = {
        "token-mean": tokens,
        "token-sum": 1,
        "seq-mean-token-sum": rows,
        "seq-mean-token-sum-norm": rows * (norm_tokens or 1),
    }
    return torch.full_like(count_B, 1 / divisor[mode], dtype=torch.float64)


def aggregate(x_BT: Tensor, mask_BT: Tensor, weights_B: Tensor, scale: float = 1.0) -> Tensor:
    """Return a micro-batch's share of the mini-batch loss, to be summed over micro-batches and averaged over ranks.

    Args:
        x_BT: loss per token.
        mask_BT: tokens that count.
        weights_B: of these rows, from :func:`row_weights`.
        scale: number of data-parallel ranks, which undoes their averaging of gradients.

    Returns:
        A scalar in float32 or better. Without tokens it is 0 and still has a graph.

    Raises:
        ValueError: shapes differ.
    """
    sums_B = _masked(x_BT, mask_BT).sum(1)
    return (sums_B * weights_B.to(sums_B)).sum() * scale


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    if x.shape != mask.shape:
        raise ValueError(f"expected numbers and mask of one shape, got {list(x.shape)} and {list(mask.shape)}")
    return torch.where(mask.bool(), x.to(torch.promote_types(x.dtype, torch.float32)), 0)


def _group_totals(groups_B: Tensor, count_B: Tensor, gather: Gather) -> Tensor:
    """Return [B] (float64): number of groups with tokens, times the tokens of the row's own group."""
    parts = gather(torch.stack([groups_B.to(torch.int64), count_B.to(groups_B.device)]))
    every_2M = torch.cat([part.to(count_B.device) for part in parts], 1)
    labels, index = every_2M[0].unique(return_inverse=True)
    totals = torch.zeros_like(labels).index_add_(0, index, every_2M[1])
    own = totals[torch.searchsorted(labels, groups_B.to(labels))]
    return ((totals > 0).sum() * own).clamp_min(1).double()


def reply_weights(tokens: int, thought_tokens: int, valid: bool, action_share: float) -> Tensor:
    """Return the weight of each token of a reply in the cross-entropy.

    The mean is 1. Without a thought all weights are; after one, the tokens that name the action have together
    ``action_share`` of the reply's weight, since many thoughts lead to the same action and cannot be predicted.

    Args:
        tokens: of the reply.
        thought_tokens: those at its beginning that are its thought.
        valid: whether the reply names an action; one that does not weighs nothing.
        action_share: from 0 to 1.

    Returns:
        [tokens] in float32.
    """
    if not valid:
        return torch.zeros(tokens)
    rest = tokens - thought_tokens
    if not thought_tokens or not rest:
        return torch.ones(tokens)
    weights = torch.full((tokens,), tokens * (1 - action_share) / thought_tokens)
    weights[thought_tokens:] = tokens * action_share / rest
    return weights


def action_weights(rollout: Rollout, action_share: float, drop_invalid: bool = False) -> Tensor:
    """Return :func:`reply_weights` of all replies of a rollout, [B, A] in float32 on the CPU, 0 off the action mask.

    Args:
        rollout: as it was played.
        action_share: from 0 to 1.
        drop_invalid: give replies that name no action no weight.
    """
    weights = torch.zeros(rollout.action_mask.shape)
    for row, sample in enumerate(rollout.samples):
        for turn, _, action, _, here in sample.placed_turns():
            named = turn.valid or not drop_invalid
            weights[row, here] = reply_weights(len(action), turn.thought_tokens, named, action_share)
    return weights


def first_tokens(mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Return the first action token of each turn, [B, A] (bool).

    Turn ids must not fall along a row; those off the mask are not read.
    """
    mask = mask_BA.bool()
    never = torch.full_like(turn_ids_BA[:, :1], torch.iinfo(turn_ids_BA.dtype).min)
    turns = torch.where(mask, turn_ids_BA, never)
    latest = torch.cat([never, turns], 1).cummax(1).values[:, :-1]  # newest turn so far
    return mask & (turns != latest)


def of_first_tokens(values_BA: Tensor, mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Return [B, A]: at each action token the value of the first one of its turn; 0 off the mask.

    Turn ids must not fall along a row; those off the mask are not read.
    """
    columns = torch.arange(mask_BA.shape[1], device=mask_BA.device).expand(mask_BA.shape)
    first = torch.where(first_tokens(mask_BA, turn_ids_BA), columns, 0).cummax(1).values
    return torch.where(mask_BA.bool(), values_BA.gather(1, first.to(values_BA.device)), 0.0)


def first_token_weights(mask_BA: Tensor, turn_ids_BA: Tensor, weight: float) -> Tensor:
    """Return [B, A]: ``weight`` on the first action token of each turn, 1 on the others, 0 off the mask; float32.

    The value of that token bootstraps the previous turn. Means divide by the number of tokens, not by the sum of
    weights. Turn ids must not fall along a row; those off the mask are not read.
    """
    first = first_tokens(mask_BA, turn_ids_BA)
    return torch.where(mask_BA.bool(), torch.where(first, weight, 1.0), 0.0)
