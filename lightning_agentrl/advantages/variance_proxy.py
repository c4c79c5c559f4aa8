"""Token energy, and proxies of signal and noise in a policy gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def token_energy(logps: Tensor, sum_pi_squared: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``w = 1 - 2 pi + sum_v pi(v)^2``, the squared norm of a log-prob's gradient in logits (arXiv 2602.07078).

    Args:
        logps: log-probs of the sampled tokens, any shape.
        sum_pi_squared: sums of squared probabilities over the vocabulary, same shape.
        weights: importance weights rho of the tokens, which scale their gradients; None: 1.

    Returns:
        ``rho^2 w`` in the same shape and float64, with w between 0 and 2.
    """
    energy = (1 - 2 * logps.double().exp() + sum_pi_squared.double()).clamp(0, 2)
    return energy if weights is None else weights.double().square() * energy


@dataclass(frozen=True)
class VarianceProxies:
    """Result of :func:`variance_proxies`. Noise is NaN with fewer than 2 rows or no norm; power is NaN without rows."""

    proxy1_signal_strength: float
    proxy2_total_power: float
    proxy3_pure_noise: float  # the raw noise, but at least 0
    proxy3_pure_noise_raw: float
    token_total_power: float


@torch.no_grad()
def variance_proxies(
    advantages_BT: Tensor,
    energy_BT: Tensor,
    mask_BT: Tensor,
    grad_norm: float,
    reduce: Reduce | None = None,
) -> VarianceProxies:
    """Compute signal, power and noise of a mini-batch's gradient (arXiv 2602.07078); only their trends are meaningful.

    For the N rows with action tokens, A_i is the mean advantage of row i's action tokens and W_i is the sum of their
    energies::

        signal = |g|^2,   power = mean_i W_i A_i^2,   noise = (power - signal) / (N - 1)
        token power = mean_i sum_k w_ik A_ik^2

    Power is measured in the space of logits and the norm in the space of parameters, so the raw noise may be negative.
    Unlike the power, the token power does not cancel advantages of different signs in a row.

    Args:
        advantages_BT: advantages as passed to the loss.
        energy_BT: energies of the tokens, see :func:`token_energy`.
        mask_BT: action mask.
        grad_norm: norm of the gradient of all rows before clipping; NaN: unknown.
        reduce: function that sums a small float64 tensor over ranks; called once. None means that there is only one
            rank.

    Raises:
        ValueError: shapes differ.
    """
    if not advantages_BT.shape == energy_BT.shape == mask_BT.shape:
        shapes = [list(x.shape) for x in (advantages_BT, energy_BT, mask_BT)]
        raise ValueError(f"expected advantages, energy and mask of one shape [B, T], got {shapes}")
    mask_BT = mask_BT.bool()
    advantages_BT = torch.where(mask_BT, advantages_BT.double(), 0)
    energy_BT = torch.where(mask_BT, energy_BT.double(), 0)
    means_B = advantages_BT.sum(1) / mask_BT.sum(1).clamp_min(1)
    by_row = (energy_BT.sum(1) * means_B.square()).sum()
    by_token = (energy_BT * advantages_BT.square()).sum()
    sums = torch.stack([mask_BT.any(1).sum().double(), by_row, by_token])
    rows, by_rows, by_tokens = (sums if reduce is None else reduce(sums)).tolist()
    signal = grad_norm**2
    power, token_power = (by_rows / rows, by_tokens / rows) if rows else (math.nan, math.nan)
    noise = (power - signal) / (rows - 1) if rows >= 2 else math.nan
    return VarianceProxies(
        proxy1_signal_strength=signal,
        proxy2_total_power=power,
        proxy3_pure_noise=noise if math.isnan(noise) else max(noise, 0.0),
        proxy3_pure_noise_raw=noise,
        token_total_power=token_power,
    )
