"""Rollouts of a fixed number of turns, the same for each environment; episodes go on in the next rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_agentrl.episodes.env_worker import close_all
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.seats import play_parts
from lightning_agentrl.rollout.session_maker import SessionMaker
from lightning_agentrl.types import Rollout


class FixedTurns:
    """The environments of one rank with their running episodes.

    Args:
        sessions: one for each environment.
        turns_per_env: turns of each of them per rollout.
    """

    def __init__(self, sessions: Sequence[Session], turns_per_env: int) -> None:
        self.sessions = sessions
        self.turns_per_env = turns_per_env

    @property
    def total(self) -> int:
        """Turns of the next rollout on this rank."""
        return len(self.sessions) * self.turns_per_env

    async def collect(self, player: Player) -> Rollout:
        """Play ``turns_per_env`` turns of each session and return them; all play at the same time."""
        recorders = [Recorder(self.turns_per_env, player.grows, player.advance) for _ in self.sessions]
        plays = [partial(player.play, *pair) for pair in zip(self.sessions, recorders, strict=True)]
        await play_parts(plays, len(plays), player.engine)
        return Rollout.from_samples([sample for recorder in recorders for sample in recorder.samples()])

    def state_dict(self) -> dict[int, Any]:
        """Return the running episode of every environment as seed and actions, by its number over all ranks."""
        return {session.index: session.state_dict() for session in self.sessions}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Continue the episodes of this rank where they were; those of other ranks are ignored."""
        for session in self.sessions:
            if session.index in state:
                session.load_state_dict(state[session.index])

    def close(self) -> None:
        close_all([session.worker for session in self.sessions])


def endless_session(make: SessionMaker, env: int, pictures: bool = False) -> Session:
    """Make the session of an environment, given by its number, whose episodes follow each other."""
    return make.session(make.pool.kind(env), env, lambda episode: derive_seed(make.seed, env, episode), pictures)
