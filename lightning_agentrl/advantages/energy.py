"""Token energy: the size of the gradient of a token's log-prob."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def token_energy(logps: Tensor, sum_pi_squared: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``w = 1 - 2 pi + sum_v pi(v)^2``, the squared norm of a log-prob's gradient in logits (arXiv 2602.07078).

    Args:
        logps: log-prob of the sampled token, any shape.
        sum_pi_squared: sum over the vocabulary of squared probabilities of the same distribution, same shape.
        weights: importance weights rho of the tokens, whose gradients are rho times as large; None: 1.

    Returns:
        ``rho^2 w`` in that shape and float64, w between 0 and 2.
    """
    energy = (1 - 2 * logps.double().exp() + sum_pi_squared.double()).clamp(0, 2)
    return energy if weights is None else weights.double().square() * energy
