"""The numbers of a prepared rollout over all ranks, as they are logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from lightning_agentrl.advantages import value_statistics
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.metrics.episodes import succeeded
from lightning_agentrl.metrics.numbers import over_ranks
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.metrics.text import TextMetrics
from lightning_agentrl.metrics.tokens import token_numbers
from lightning_agentrl.types import Rollout


def describe(rollout: Rollout, device: torch.device, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """All numbers of a rollout by name; every rank must call it. ``docs/metrics.md`` says what each one means.

    Args:
        rollout: scored, with advantages and returns.
        device: where ranks can exchange tensors.
        reduce: sums a tensor over ranks.
    """
    numbers = over_ranks({**rollout_numbers(rollout), **token_numbers(rollout)}, device)
    text = TextMetrics().to(device)
    text.update(rollout.turns)
    numbers |= text.compute()
    if rollout.scores.values is not None and rollout.returns is not None:
        values = value_statistics(rollout.scores.values, rollout.returns, rollout.action_mask, reduce)
        numbers |= {f"critic/{name}": value for name, value in asdict(values).items()}
    return numbers


class RecentEpisodes:
    """Success of the last episodes of all ranks: unlike the episodes of one rollout, short ones do not prevail."""

    def __init__(self, size: int = 100) -> None:
        self.successes: deque[bool] = deque(maxlen=size)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Take in the episodes that ended in a rollout; every rank must call it."""
        for part in all_gather([succeeded(turn) for turn in rollout.turns if turn.done]):
            self.successes.extend(part)
        if not self.successes:
            return {}
        return {"rollout/success_window": sum(self.successes) / len(self.successes)}

    def state_dict(self) -> list[bool]:
        return list(self.successes)

    def load_state_dict(self, successes: list[bool]) -> None:
        self.successes.clear()
        self.successes.extend(successes)
