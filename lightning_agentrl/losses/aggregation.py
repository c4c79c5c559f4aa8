"""Aggregation of token losses to one number, masks of the first tokens of turns, and weights of tokens in a reply."""

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
    """Return the sum of ``x`` over a mask of the same shape, in float32 or better; values off the mask are ignored.

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
            "norm_tokens must be set for aggregation seq-mean-token-sum-norm and for no other, "
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

    With N tokens in R non-empty rows and K tokens in the row: ``token-mean`` 1 / N, ``token-sum`` 1,
    ``seq-mean-token-sum`` 1 / R, ``seq-mean-token-mean`` 1 / (R K), ``seq-mean-token-sum-norm`` 1 / (R
    ``norm_tokens``), and ``prompt-mean`` 1 / (G N_g) for G groups with N_g tokens in the row's group. Totals are of the
    whole mini-batch on all ranks, so the split into micro-batches does not change the mean.

    Args:
        mask_BT: tokens that count, for all rows of the mini-batch on this rank.
        mode: aggregation mode.
        norm_tokens: constant length by which seq-mean-token-sum-norm divides.
        groups_B: group label of each row, for prompt-mean.
        gather: function that gathers a tensor from all ranks.

    Raises:
        ValueError: the mode is unknown, or ``norm_tokens`` does not fit it.
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
    """Return a micro-batch's part of the mini-batch loss, to be summed over micro-batches and averaged over ranks.

    Args:
        x_BT: loss per token.
        mask_BT: tokens that count.
        weights_B: weights of the rows from :func:`row_weights`.
        scale: number of data-parallel ranks, to undo the averaging of gradients over ranks.

    Returns:
        Scalar in float32 or better. Without tokens the loss is 0 and still has a graph.

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
    """Return, for each row, the number of groups with tokens times the number of tokens in its group, [B] float64."""
    parts = gather(torch.stack([groups_B.to(torch.int64), count_B.to(groups_B.device)]))
    every_2M = torch.cat([part.to(count_B.device) for part in parts], 1)
    labels, index = every_2M[0].unique(return_inverse=True)
    totals = torch.zeros_like(labels).index_add_(0, index, every_2M[1])
    own = totals[torch.searchsorted(labels, groups_B.to(labels))]
    return ((totals > 0).sum() * own).clamp_min(1).double()


def reply_weights(tokens: int, thought_tokens: int, valid: bool, action_share: float) -> Tensor:
    """Return the weights of a reply's tokens in the cross-entropy, with mean 1.

    Without a thought all weights are 1. With a thought, the tokens that name the action together have the fraction
    ``action_share`` of the reply's weight, since many thoughts lead to the same action and cannot be predicted.

    Args:
        tokens: number of tokens in the reply.
        thought_tokens: number of tokens in the thought at its beginning.
        valid: whether the reply names an action; if False, all weights are 0.
        action_share: fraction of the weight on the action, from 0 to 1.

    Returns:
        Weights [tokens] in float32.
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
    """Return :func:`reply_weights` of all replies in a rollout: [B, A] in float32 on the CPU, 0 off the action mask.

    Args:
        rollout: collected rollout.
        action_share: fraction of a reply's weight on the action, from 0 to 1.
        drop_invalid: whether replies that name no action have weight 0.
    """
    weights = torch.zeros(rollout.action_mask.shape)
    for row, sample in enumerate(rollout.samples):
        for turn, _, action, _, here in sample.placed_turns():
            named = turn.valid or not drop_invalid
            weights[row, here] = reply_weights(len(action), turn.thought_tokens, named, action_share)
    return weights


def first_tokens(mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Return a mask [B, A] of the first action token of each turn.

    Turn ids must not decrease along a row; values off the mask are ignored.
    """
    mask = mask_BA.bool()
    never = torch.full_like(turn_ids_BA[:, :1], torch.iinfo(turn_ids_BA.dtype).min)
    turns = torch.where(mask, turn_ids_BA, never)
    latest = torch.cat([never, turns], 1).cummax(1).values[:, :-1]  # largest turn id so far
    return mask & (turns != latest)


def of_first_tokens(values_BA: Tensor, mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Replace the value of each action token by that of its turn's first action token: [B, A], 0 off the mask.

    Turn ids must not decrease along a row; values off the mask are ignored.
    """
    columns = torch.arange(mask_BA.shape[1], device=mask_BA.device).expand(mask_BA.shape)
    first = torch.where(first_tokens(mask_BA, turn_ids_BA), columns, 0).cummax(1).values
    return torch.where(mask_BA.bool(), values_BA.gather(1, first.to(values_BA.device)), 0.0)


def first_token_weights(mask_BA: Tensor, turn_ids_BA: Tensor, weight: float) -> Tensor:
    """Return weights [B, A] (float32): ``weight`` on the first action token of each turn, 1 on others, 0 off the mask.

    The value of the first token bootstraps the previous turn. Means divide by the number of tokens, not by the sum of
    weights. Turn ids must not decrease along a row; values off the mask are ignored.
    """
    first = first_tokens(mask_BA, turn_ids_BA)
    return torch.where(mask_BA.bool(), torch.where(first, weight, 1.0), 0.0)
