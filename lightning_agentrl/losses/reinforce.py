"""REINFORCE, which is also the loss of GPG."""

from __future__ import annotations

from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss


def reinforce_loss(logps: Tensor, advantages: Tensor) -> Tensor:
    """Return ``-A logps``, any shape (GPG: arXiv 2504.02546)."""
    return -advantages * logps


class Reinforce(PolicyLoss):
    """The plain policy gradient, without ratio or bounds, for one optimizer step per rollout."""

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return reinforce_loss(logps_BA, advantages_BA)
