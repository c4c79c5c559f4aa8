"""Collections: what a rollout is made of, and what of it lives on from one rollout to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.types import Rollout


class Collection(ABC):
    """The environments of one rank with their running episodes."""

    unit: ClassVar[str]  # what progress counts

    @property
    @abstractmethod
    def total(self) -> int:
        """How much of it the next rollout has on this rank."""

    @property
    @abstractmethod
    def sessions(self) -> Sequence[Session]:
        """Where an episode is running."""

    @abstractmethod
    async def collect(self, collector: Collector) -> Rollout:
        """The next rollout of this rank."""

    @abstractmethod
    def state_dict(self) -> dict[int, Any]:
        """Plain types, by a number over all ranks, so that any number of ranks can share them out."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Go on where the numbers of this rank were; those of other ranks are left alone."""

    @abstractmethod
    def close(self) -> None:
        """Close all environments."""


class FixedTurns(Collection):
    """So many turns of each environment; episodes go on in the next rollout.

    Args:
        sessions: of this rank.
        turns_per_env: turns of each of them per rollout.
    """

    unit = "turns"

    def __init__(self, sessions: Sequence[Session], turns_per_env: int) -> None:
        self._sessions = sessions
        self.turns_per_env = turns_per_env

    @property
    def total(self) -> int:
        return len(self._sessions) * self.turns_per_env

    @property
    def sessions(self) -> Sequence[Session]:
        return self._sessions

    async def collect(self, collector: Collector) -> Rollout:
        return await collector.fixed_turns(self._sessions, self.turns_per_env)

    def state_dict(self) -> dict[int, Any]:
        """Every environment as seed and actions of its running episode."""
        return {session.index: session.state_dict() for session in self._sessions}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        for session in self._sessions:
            if session.index in state:
                session.load_state_dict(state[session.index])

    def close(self) -> None:
        for session in self._sessions:
            session.close()
