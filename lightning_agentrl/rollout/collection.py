"""What collects rollouts: fixed turns, groups, and either of them with forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types import Rollout


class Collection(Protocol):
    """The environments of one rank, and which of their turns are a rollout."""

    @property
    def total(self) -> int:
        """What the next rollout counts as its progress on this rank, turns or episodes."""

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions in which an episode is running."""

    async def collect(self, player: Player) -> Rollout:
        """Play the next rollout and return it."""

    def state_dict(self) -> dict[int, Any]:
        """Return what is running, as plain types."""

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Continue what belongs to this rank."""

    def close(self) -> None:
        """Close all environments."""
