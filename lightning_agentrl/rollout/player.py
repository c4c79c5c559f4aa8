"""Playing a session: interaction, engine and recorder, with a watchdog beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.types import Turn


@dataclass(frozen=True)
class Player:
    """Everything that playing takes besides a session."""

    interaction: Interaction
    engine: Engine
    grows: bool  # one growing sample per episode
    temperature: float
    seed: int
    advance: Callable[[], None] = lambda: None  # called after each turn of a rollout, and after each whole episode
    watchdog: Watchdog | None = None

    async def play(self, session: Session, recorder: Recorder) -> None:
        """Play on until the recorder is full."""
        with self.watchdog.watching(session) if self.watchdog else nullcontext():
            await self.interaction.run(session, self.engine, recorder, self.temperature, self.seed)

    async def episode(self, session: Session) -> list[Turn]:
        """Play one whole episode in a fresh session; return its turns."""
        recorder = Recorder(None, self.grows)
        await self.play(session, recorder)
        self.advance()
        return [turn for sample in recorder.samples() for turn in sample.turns]
