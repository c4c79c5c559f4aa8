"""What losses, aggregation and correction are by definition: plain loops over Python numbers, one token at a time.

A policy loss is a function of one row: log-probs ``x``, the same log-probs ``c`` where they are constants (behind a
stop gradient), old log-probs and advantages of its tokens that count, and which of them were picked. Derivatives by
``x`` are the gradients that training should see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Row = Sequence[float]
Rows = Sequence[Row]
RowLoss = Callable[[Row, Row, Row, Row, Sequence[bool]], list[float]]


def clamped(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def ratios(x: Row, old: Row) -> list[float]:
    return [math.exp(clamped(a - b)) for a, b in zip(x, old, strict=True)]


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(x: Row) -> float:
    return sum(x) / len(x)


def ppo_token(rho: float, a: float, low: float = 0.2, high: float = 0.2, dual: float | None = 3.0) -> float:
    loss = max(-a * rho, -a * clip(rho, 1 - low, 1 + high))
    return min(loss, -a * dual) if a < 0 and dual is not None else loss


def ppo(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [ppo_token(rho, a) for rho, a in zip(ratios(x, old), adv, strict=True)]


def gspo(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    s = math.exp(mean([clamped(a - b) for a, b in zip(c, old, strict=True)]))
    return [ppo_token(s * math.exp(xi - ci), a, 3e-4, 4e-4, None) for xi, ci, a in zip(x, c, adv, strict=True)]


def gmpo(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    logs = []
    for xi, o, a in zip(x, old, adv, strict=True):
        log = clamped(xi - o)
        logs.append(sign(a) * min(sign(a) * log, sign(a) * clip(log, -0.4, 0.4)))
    return [-mean(adv) * math.exp(mean(logs))] * len(x)


def cispo(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [-clip(rho, 0.0, 1.28) * a * xi for rho, a, xi in zip(ratios(c, old), adv, x, strict=True)]


def sapo(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    taus = [1.0 if a > 0 else 1.05 for a in adv]
    return [-a * 4 / tau * sigmoid(tau * (rho - 1)) for rho, a, tau in zip(ratios(x, old), adv, taus, strict=True)]


def dppo(shift: Callable[[float, float], float], limit: float) -> RowLoss:
    def loss(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
        losses = []
        for xi, ci, o, a, rho in zip(x, c, old, adv, ratios(c, old), strict=True):
            pi, mu = math.exp(ci), math.exp(o)
            out = shift(pi, mu) > limit and ((a > 0 and pi > mu) or (a < 0 and pi < mu))
            losses.append(0.0 if out else -a * min(rho, 20.0) * xi)
        return losses

    return loss


def binary_tv(pi: float, mu: float) -> float:
    return abs(pi - mu)


def binary_kl(pi: float, mu: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def reinforce(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [-a * xi for a, xi in zip(adv, x, strict=True)]


def dro(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [-(a * xi - 0.5 / 2 * clamped(xi - o) ** 2) for a, xi, o in zip(adv, x, old, strict=True)]


def clip_cov(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [0.0 if out else loss for loss, out in zip(ppo(x, c, old, adv, picked), picked, strict=True)]


def kl_cov(x: Row, c: Row, old: Row, adv: Row, picked: Sequence[bool]) -> list[float]:
    return [
        -a * rho + (abs(clamped(xi - o)) if pulled else 0.0)
        for a, rho, xi, o, pulled in zip(adv, ratios(x, old), x, old, picked, strict=True)
    ]


POLICY_LOSSES: dict[str, RowLoss] = {
    "PPOClip": ppo,
    "GSPO": gspo,
    "GMPO": gmpo,
    "CISPO": cispo,
    "SAPO": sapo,
    "DPPOTV": dppo(binary_tv, 0.15),
    "DPPOKL": dppo(binary_kl, 0.05),
    "Reinforce": reinforce,
    "DRO": dro,
    "ClipCov": clip_cov,
    "KLCov": kl_cov,
}


def policy_loss(
    name: str, x: Rows, c: Rows, old: Rows, adv: Rows, mask: Sequence[Sequence[bool]], picked: Sequence[Sequence[bool]]
) -> list[list[float]]:
    """Loss of every token, 0 off the mask."""
    losses = []
    for rows in zip(x, c, old, adv, picked, mask, strict=True):
        *columns, used = rows
        places = [k for k, counts in enumerate(used) if counts]
        loss = [0.0] * len(used)
        if places:
            of_row = POLICY_LOSSES[name](*([column[k] for k in places] for column in columns))
            for k, value in zip(places, of_row, strict=True):
                loss[k] = value
        losses.append(loss)
    return losses


def picked_tokens(
    name: str,
    x: Rows,
    old: Rows,
    adv: Rows,
    mask: Sequence[Sequence[bool]],
    noise: Rows,
    share: float,
    low: float,
    high: float,
) -> list[list[bool]]:
    """Tokens that Clip-Cov and KL-Cov choose from a whole mini-batch."""
    places = [(i, k) for i, row in enumerate(mask) for k, counts in enumerate(row) if counts]
    if not places:
        return [[False] * len(row) for row in mask]
    mean_a, mean_x = (mean([rows[i][k] for i, k in places]) for rows in (adv, x))
    cov = {(i, k): (adv[i][k] - mean_a) * (x[i][k] - mean_x) for i, k in places}
    count = max(1, math.floor(share * len(places)))
    if name == "KLCov":
        chosen = sorted(places, key=lambda p: (cov[p], noise[p[0]][p[1]]), reverse=True)[:count]
    else:
        free = []
        for i, k in places:
            rho, a = math.exp(clamped(x[i][k] - old[i][k])), adv[i][k]
            held = (a > 0 and rho > 1.2) or (a < 0 and (rho < 0.8 or rho > 3.0))
            if low < cov[i, k] < high and not held:
                free.append((i, k))
        chosen = sorted(free, key=lambda p: noise[p[0]][p[1]], reverse=True)[:count]
    return [[(i, k) in chosen for k in range(len(row))] for i, row in enumerate(mask)]


def aggregated(x: Rows, mask: Sequence[Sequence[bool]], mode: str, groups: Sequence[int], norm_tokens: int) -> float:
    """One number of the losses of a mini-batch."""
    rows = [[xi for xi, counts in zip(row, used, strict=True) if counts] for row, used in zip(x, mask, strict=True)]
    filled = [row for row in rows if row]
    tokens = [xi for row in filled for xi in row]
    if not tokens:
        return 0.0
    if mode == "token-mean":
        return mean(tokens)
    if mode == "token-sum":
        return sum(tokens)
    if mode == "seq-mean-token-sum":
        return mean([sum(row) for row in filled])
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in filled])
    if mode == "seq-mean-token-sum-norm":
        return mean([sum(row) / norm_tokens for row in filled])
    of_groups: dict[int, list[float]] = {}
    for group, row in zip(groups, rows, strict=True):
        of_groups.setdefault(group, []).extend(row)
    return mean([mean(group) for group in of_groups.values() if group])


# Off-policy correction; log-ratios trainer / engine of the action tokens of each row


def kept_row(logs: Row, kind: str, level: str, low: float, high: float) -> list[bool]:
    """Tokens of a row that pass a rejection: k1 by an interval of the ratio, k2 and k3 by the bound ``high``."""
    if kind == "k1":
        inside = [math.log(low) <= x <= math.log(high) for x in logs]
        if level == "token":
            return inside
        if level == "max":
            return [all(inside)] * len(logs)
        statistic = sum(logs) if level == "sum" else mean(logs)
        return [math.log(low) <= statistic <= math.log(high)] * len(logs)
    values = [x * x / 2 if kind == "k2" else math.exp(x) - 1 - x for x in logs]
    if level == "token":
        return [value <= high for value in values]
    statistic = {"sum": sum(values), "mean": mean(values), "max": max(values)}[level]
    return [statistic <= high] * len(logs)


def ratios_of_row(logs: Row, level: str) -> list[float]:
    if level == "token":
        return [math.exp(x) for x in logs]
    return [math.exp(sum(logs))] * len(logs)
