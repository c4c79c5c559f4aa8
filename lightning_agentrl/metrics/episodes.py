"""Success, return and length of whole episodes, reduced over ranks by torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_agentrl.metrics.numbers import Mean
from lightning_agentrl.types import StopReason, Turn


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode."""

    success: bool
    total_reward: float  # environment reward, without penalties
    turns: int
    valid_turns: int
    lost: bool = False  # the environment failed
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the environment told in the last turn


def succeeded(last: Turn) -> bool:
    """Return whether an episode succeeded, by its last turn: as the environment reports, else by a positive return.

    One that is lost to a fault of its environment did not.
    """
    if last.stop is StopReason.ENV_FAULT:
        return False
    return last.episode_return > 0 if last.success is None else last.success


def summarise(turns: Sequence[Turn], lost: bool = False) -> EpisodeResult:
    """Return the result of one finished episode, given its turns; one that is lost may have none."""
    if not turns:
        return EpisodeResult(success=False, total_reward=0.0, turns=0, valid_turns=0, lost=lost)
    last = turns[-1]
    valid = sum(turn.valid for turn in turns)
    return EpisodeResult(succeeded(last), last.episode_return, len(turns), valid, lost, last.metrics)


def told_by_environments(results: Sequence[EpisodeResult]) -> dict[str, Mean]:
    """Return the mean of each number that environments told at the end of these episodes; others do not count."""
    told = [result.metrics for result in results]
    names = sorted({name for metrics in told for name in metrics})
    return {
        name: Mean(sum(metrics.get(name, 0.0) for metrics in told), sum(name in metrics for metrics in told))
        for name in names
    }


def wilson_interval(successes: float, episodes: float, z: float = 1.959964) -> tuple[float, float]:
    """Return the bounds of a binomial proportion (Wilson 1927), 95 % by default; (0, 1) without episodes."""
    if not episodes:
        return 0.0, 1.0
    share = successes / episodes
    scale = 1 + z * z / episodes
    middle = (share + z * z / (2 * episodes)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / episodes + z * z / (4 * episodes * episodes))
    return max(middle - half, 0.0), min(middle + half, 1.0)


class EpisodeMetrics(Metric):
    """Sums over episodes; :meth:`compute` gives their rates over all ranks."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        # episodes, successes, sum of returns, turns, valid turns, lost episodes
        self.add_state("sums", default=torch.zeros(6, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, results: Iterable[EpisodeResult]) -> None:
        for r in results:
            row = [1.0, float(r.success), r.total_reward, float(r.turns), float(r.valid_turns), float(r.lost)]
            self.sums += torch.tensor(row, dtype=torch.float64, device=self.sums.device)

    def compute(self) -> dict[str, float]:
        episodes, successes, returns, turns, valid, lost = self.sums.tolist()
        if not episodes:
            return {}
        low, high = wilson_interval(successes, episodes)
        return {
            "success": successes / episodes,
            "success_low": low,
            "success_high": high,
            "return": returns / episodes,
            "mean_turns": turns / episodes,
            **({"valid_action_ratio": valid / turns} if turns else {}),
            "episodes": episodes,
            "lost_episodes": lost,
        }

    def set_dtype(self, dst_type: torch.dtype | str) -> EpisodeMetrics:  # counts stay float64 under every precision
        return self
