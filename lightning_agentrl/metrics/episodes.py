"""Metrics of whole episodes (success, return, length), reduced over ranks by torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_agentrl.distributed import Mean
from lightning_agentrl.types import Turn

TOOLS = "tools/"  # prefix of metrics that are summed over all turns
GAINED, DEVIATIONS = slice(5, 7), slice(7, 9)  # columns of return and progression: sums, sums of squared deviations


@dataclass(frozen=True)
class EpisodeResult:
    """Result of one finished episode."""

    success: bool
    total_reward: float  # sum of the environment's rewards, without penalties
    turns: int
    valid_turns: int
    lost: bool = False  # whether the environment failed
    progression: float = 0.0  # as the environment reports it; by default 1 for success and 0 for failure
    source: int = 0  # index of the episode's environment in the list of sources
    # Metrics are those of the last turn, except tool metrics, which are sums over all turns.
    metrics: Mapping[str, float] = field(default_factory=dict)


def summarise(turns: Sequence[Turn], lost: bool = False, source: int = 0) -> EpisodeResult:
    """Return the result of one finished episode, given its turns; a lost episode may have no turns."""
    if not turns:
        return EpisodeResult(success=False, total_reward=0.0, turns=0, valid_turns=0, lost=lost, source=source)
    last = turns[-1]
    success, valid, numbers = last.succeeded, sum(turn.valid for turn in turns), last.finite_metrics
    numbers |= {n: sum(turn.metrics.get(n, 0.0) for turn in turns) for n in numbers if n.startswith(TOOLS)}
    progression = numbers.get("progression", float(success))
    return EpisodeResult(success, last.episode_return, len(turns), valid, lost, progression, source, numbers)


def reported_means(results: Sequence[EpisodeResult]) -> dict[str, Mean]:
    """Return the mean of each metric reported at the end of episodes, over the episodes that have the metric."""
    every = [result.metrics for result in results]
    names = sorted({name for metrics in every for name in metrics})
    return {
        name: Mean(sum(metrics.get(name, 0.0) for metrics in every), sum(name in metrics for metrics in every))
        for name in names
    }


def wilson_interval(successes: float, episodes: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of a binomial proportion (Wilson 1927); (0, 1) without episodes."""
    if not episodes:
        return 0.0, 1.0
    z, share = 1.959964, successes / episodes
    scale = 1 + z * z / episodes
    middle = (share + z * z / (2 * episodes)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / episodes + z * z / (4 * episodes * episodes))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _rates(sums: Sequence[float]) -> dict[str, float]:
    """Return means over episodes, and the standard errors of return and progression, given the sums of a source."""
    episodes, successes, turns, valid, lost, returns, progression, return_deviations, progression_deviations = sums
    if not episodes:
        return {}
    low, high = wilson_interval(successes, episodes)
    numbers = {
        "success": successes / episodes,
        "success_low": low,
        "success_high": high,
        "return": returns / episodes,
        "progression": progression / episodes,
        "mean_turns": turns / episodes,
        **({"valid_action_ratio": valid / turns} if turns else {}),
        "episodes": episodes,
        "lost_episodes": lost,
    }
    if episodes > 1:
        numbers["return_error"] = _standard_error(return_deviations, episodes)
        numbers["progression_error"] = _standard_error(progression_deviations, episodes)
    return numbers


def _standard_error(deviations: float, count: float) -> float:
    """Return the standard error of a mean, given the sum of squared deviations from the mean and the count (from 2)."""
    return math.sqrt(deviations / (count - 1) / count)


def _joined(parts: Tensor) -> Tensor:
    """Merge the sums [P, S, 9] of several parts into sums [S, 9] over all episodes; see :class:`EpisodeMetrics`.

    Squared deviations are from the mean of each part and are merged (Chan et al. 1979), since sums of squares lose
    precision if returns are large compared with their spread.
    """
    joined, counts = parts.sum(0), parts[..., :1]
    means = parts[..., GAINED] / counts.clamp_min(1)
    shifts = means - joined[..., GAINED] / joined[..., :1].clamp_min(1)
    joined[..., DEVIATIONS] += (counts * shifts.square()).sum(0)
    return joined


def _mean_of_sources(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean progression with equal weights of all sources, and its standard error."""
    numbers = {"sources/progression": sum(rates["progression"] for rates in parts) / len(parts)} if parts else {}
    errors = [rates["progression_error"] for rates in parts if "progression_error" in rates]
    if errors and len(errors) == len(parts):
        numbers["sources/progression_error"] = math.hypot(*errors) / len(errors)
    return numbers


class EpisodeMetrics(Metric):
    """Metric that accumulates episodes; :meth:`compute` returns means over all ranks.

    Args:
        sources: names of the environments. With several environments, each environment also has separate metrics,
            ``source/<name>/<metric>``.
    """

    full_state_update = False
    sums: Tensor  # [S, 9], one row of sums and sums of squared deviations per source

    def __init__(self, sources: Sequence[str] = ("",)) -> None:
        super().__init__()
        self.sources = tuple(sources)
        self.add_state("sums", default=torch.zeros(len(self.sources), 9, dtype=torch.float64), dist_reduce_fx=_joined)

    def set_dtype(self, dst_type: torch.dtype | str) -> Self:
        """Keep float64 whatever the precision of the trainer."""
        return self

    def update(self, results: Sequence[EpisodeResult]) -> None:
        rows = torch.zeros(len(results), *self.sums.shape, dtype=torch.float64)
        for row, r in zip(rows, results, strict=True):
            columns = (1.0, r.success, r.turns, r.valid_turns, r.lost, r.total_reward, r.progression, 0.0, 0.0)
            row[r.source] = torch.tensor(columns, dtype=torch.float64)
        self.sums = _joined(torch.cat([self.sums[None], rows.to(self.sums.device)]))

    def compute(self) -> dict[str, float]:
        numbers = _rates(_joined(self.sums[:, None])[0].tolist())
        if len(self.sources) == 1:
            return numbers
        parts = {
            name: rates for name, sums in zip(self.sources, self.sums.tolist(), strict=True) if (rates := _rates(sums))
        }
        own = {f"source/{name}/{key}": rate for name, rates in parts.items() for key, rate in rates.items()}
        return numbers | own | _mean_of_sources(list(parts.values()))
