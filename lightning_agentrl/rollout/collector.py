"""Collecting: sessions, interaction and engine give a fixed number of turns, whole episodes, or parts of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.types import Rollout, Turn


@dataclass(frozen=True)
class Collector:
    """Everything a collection needs besides the sessions."""

    interaction: Interaction
    engine: Engine
    grows: bool  # one growing sample per episode
    temperature: float
    seed: int
    advance: Callable[[], None] = lambda: None  # called after each turn of a rollout, and after each whole episode
    watchdog: Watchdog | None = None

    async def fixed_turns(self, sessions: Sequence[Session], turns_per_env: int) -> Rollout:
        """``turns_per_env`` turns of each session. Episodes go on across calls; no session waits for another."""
        recorders = [Recorder(turns_per_env, self.grows, self.advance) for _ in sessions]
        async with asyncio.TaskGroup() as tasks:
            for session, recorder in zip(sessions, recorders, strict=True):
                tasks.create_task(self._run(session, recorder))
        return Rollout.from_samples([sample for recorder in recorders for sample in recorder.samples()])

    async def episode(self, session: Session) -> list[Turn]:
        """The turns of one whole episode from a fresh session."""
        recorder = Recorder(None, self.grows)
        await self._run(session, recorder)
        self.advance()
        return [turn for sample in recorder.samples() for turn in sample.turns]

    async def part(self, session: Session, recorder: Recorder) -> None:
        """Play until the recorder is full; for episodes that are played in several parts."""
        await self._run(session, recorder)

    async def _run(self, session: Session, recorder: Recorder) -> None:
        with self.watchdog.watching(session) if self.watchdog else nullcontext():
            await self.interaction.run(session, self.engine, recorder, self.temperature, self.seed)
