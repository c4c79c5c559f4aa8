"""A quick critic: ridge regression on hidden states, judged on starts that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_agentrl.metrics.facts import UNKNOWN, Measured, ratio

FOLDS = 5
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # of squared weights, in units of the mean squared norm of a state


def explained_variance(states_NH: Tensor, returns_N: Tensor, starts: Sequence[int]) -> Measured:
    """Return the share of the variance of returns that a ridge regression explains across starts.

    Starts are divided into folds. The values in each fold come from a regression on the others, whose penalty is chosen
    on those alone. It may be negative. Where returns are noisy, no critic reaches 1.

    Args:
        states_NH: features of N states.
        returns_N: what followed each of them.
        starts: where the episode of each state began.
    """
    places = {start: place for place, start in enumerate(sorted(set(starts)))}
    folds = min(FOLDS, len(places))
    if folds < 3 or float(returns_N.double().var(correction=0)) < 1e-12:
        return UNKNOWN
    start_N = torch.tensor([places[start] for start in starts])
    fold_N = start_N % folds
    x_NH, y_N = states_NH.double(), returns_N.double()
    values_N, means_N = torch.empty_like(y_N), torch.empty_like(y_N)
    for fold in range(folds):
        train_N = fold_N != fold
        penalty = _best_penalty(x_NH[train_N], y_N[train_N], fold_N[train_N])
        values_N[~train_N] = ridge(x_NH[train_N], y_N[train_N], x_NH[~train_N], (penalty,))[0]
        means_N[~train_N] = y_N[train_N].mean()
    unexplained_S, total_S = (torch.zeros(len(places), dtype=torch.float64) for _ in range(2))
    unexplained_S.index_add_(0, start_N, (y_N - values_N) ** 2)
    total_S.index_add_(0, start_N, (y_N - means_N) ** 2)
    return ratio(list(zip((total_S - unexplained_S).tolist(), total_S.tolist(), strict=True)))


def ridge(x_NH: Tensor, y_N: Tensor, others_MH: Tensor, penalties: Sequence[float]) -> Tensor:
    """Return values [P, M] of other states by ridge regressions with each penalty; features are standardised."""
    mean_H, spread_H = x_NH.mean(0), x_NH.std(0, correction=0)
    scale_H = torch.where(spread_H > 1e-9, 1 / (spread_H.clamp_min(1e-9) * x_NH.shape[1] ** 0.5), 0.0)
    z_NH, z_MH = (x_NH - mean_H) * scale_H, (others_MH - mean_H) * scale_H
    squares_N, axes_NN = torch.linalg.eigh(z_NH @ z_NH.T)
    weights_N = axes_NN.T @ (y_N - y_N.mean())
    seen_MN = z_MH @ z_NH.T @ axes_NN
    return torch.stack([seen_MN @ (weights_N / (squares_N.clamp_min(0) + p)) for p in penalties]) + y_N.mean()


def _best_penalty(x_NH: Tensor, y_N: Tensor, fold_N: Tensor) -> float:
    """Return the penalty with the least squared error over folds that are left out one by one."""
    errors_P = torch.zeros(len(PENALTIES), dtype=torch.float64)
    for fold in fold_N.unique():
        train_N = fold_N != fold
        values_PM = ridge(x_NH[train_N], y_N[train_N], x_NH[~train_N], PENALTIES)
        errors_P += ((values_PM - y_N[~train_N]) ** 2).sum(1)
    return PENALTIES[int(errors_P.argmin())]
