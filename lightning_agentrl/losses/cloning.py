"""Weights of the tokens of replies: how much of each lies on the tokens that name the action."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.types import Rollout


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
