"""What a checkpoint holds of the rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.types import Rollout, rollout_from_plain, rollout_to_plain
from lightning_agentrl.types.plain import with_tensors


@dataclass
class RolloutState:
    """The point from which collecting continues."""

    sessions: dict[int, Any] = field(default_factory=dict)  # running episodes by number
    iteration: int = 0  # iterations begun
    collected: int = 0  # rollouts
    origin: str = ""  # what the episodes follow from
    ahead: Rollout | None = None  # collected and not trained on yet
    lost: Sequence[bool] = ()  # of the last episodes of all ranks, whether they were lost

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> RolloutState:
        """Read the state of all ranks from plain types."""
        ahead = state["ahead"]
        return cls(**{**state, "ahead": None if ahead is None else rollout_from_plain(ahead)})

    def to_plain(self) -> dict[str, Any]:
        """Return the state of all ranks as plain types and tensors; every rank must call it."""
        return {
            "sessions": {i: state for part in all_gather(with_tensors(self.sessions)) for i, state in part.items()},
            "iteration": self.iteration,
            "collected": self.collected,
            "origin": self.origin,
            "ahead": pooled(self.ahead),
            "lost": list(self.lost),
        }

    def check_origin(self, origin: str) -> None:
        """Refuse to continue with other episodes than were begun.

        Raises:
            ValueError: with the keys to change.
        """
        if (self.sessions or self.collected) and self.origin != origin:
            raise ValueError(
                f"the checkpoint's environments are {self.origin}; this run has {origin}, so their episodes "
                "cannot continue: give the same data.init_args.env (or envs) and seed, or start without --ckpt_path"
            )


def pooled(rollout: Rollout | None) -> dict[str, Any] | None:
    """Return the rows of all ranks, each once, as plain types; every rank must call it."""
    plain = all_gather(None if rollout is None else rollout_to_plain(rollout))
    parts = [rollout_from_plain(part) for part in plain if part is not None]
    if not parts:
        return None
    every = Rollout.concat(parts)
    rows: dict[tuple[int, int, int], int] = {}
    for row, sample in enumerate(every.samples):
        first = sample.turns[0]
        rows.setdefault((first.env, first.episode, first.index), row)
    return rollout_to_plain(every.select(list(rows.values())))


def rows_of(rollout: Rollout, envs: Sequence[int]) -> Rollout:
    """Return the rows of these environments."""
    own = set(envs)
    return rollout.select([i for i, sample in enumerate(rollout.samples) if sample.turns[0].env in own])
