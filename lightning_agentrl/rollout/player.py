"""Playing a session: interaction, engine and recorder, with a watchdog beside them, and what becomes of faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.env_worker import warn_each
from lightning_agentrl.episodes.interaction import WHOLE_EPISODE_TURNS, Interaction
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import TOO_LONG, Session
from lightning_agentrl.errors import EnvError
from lightning_agentrl.prompts.renderer import PromptTooLongError
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.types import Sample, StopReason, Turn

IN_A_ROW = 5  # default of FaultLimits.in_a_row


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
    in_a_row: int = IN_A_ROW  # episodes that an environment may lose without a turn between; one more is an error

    async def play(self, session: Session, recorder: Recorder) -> str:
        """Play on until the recorder is full.

        An episode in which the environment fails beyond its retries ends at its last sound turn. If the recorder takes
        further episodes, the next one begins, and the fault is noted in a turn.

        Returns:
            The kind of the fault to which the only episode of the recorder was lost; empty if it was not.

        Raises:
            EnvError: one episode after the other is lost.
            ValueError: the interaction plays nothing, and would do so for ever.
        """
        if not recorder.goes_on and self.interaction.max_turns is None:
            recorder.longest = WHOLE_EPISODE_TURNS
        with self.watchdog.watching(session) if self.watchdog else nullcontext():
            while not recorder.full:
                recorded = recorder.recorded
                try:
                    await self.interaction.run(session, self.engine, recorder, self.temperature, self.seed)
                    self._check_moved(recorder, recorded)
                    session.worker.lost_seeds.clear()
                except (EnvError, PromptTooLongError) as error:
                    if recorder.recorded > recorded:
                        session.worker.lost_seeds.clear()
                    fault = error if isinstance(error, EnvError) else EnvError(TOO_LONG, str(error))
                    if kind := self._end(session, recorder, fault):
                        return kind
        if recorder.longest is not None and recorder.recorded >= recorder.longest:
            recorder.truncate(StopReason.MAX_TURNS, session.last_state, ())
        return ""

    def _check_moved(self, recorder: Recorder, recorded: int) -> None:
        if recorder.recorded == recorded:
            raise ValueError(
                f"run of {type(self.interaction).__name__} has ended without recording a turn; it must record turns "
                "until the recorder is full (key data.init_args.interaction)"
            )

    def _end(self, session: Session, recorder: Recorder, fault: EnvError) -> str:
        """End an episode that cannot go on; return the fault's kind if nothing else is to be played."""
        session.leave()
        if fault.kind == TOO_LONG and recorder.truncate(StopReason.CONTEXT_LENGTH, session.last_state, ()):
            return ""
        noted = (fault.kind,) if recorder.goes_on else ()
        if not recorder.truncate(StopReason.ENV_FAULT, session.state_before_turn, noted):
            session.lost += noted
        self.count_lost(session, fault)
        return "" if recorder.goes_on else fault.kind

    def count_lost(self, session: Session, fault: EnvError) -> None:
        """Warn of an episode that is lost to a fault.

        Raises:
            EnvError: the environment has lost too many in a row.
        """
        lost = session.worker.lost_seeds
        lost.add(session.episode.seed)
        notes = getattr(fault, "__notes__", ())
        if len(lost) > self.in_a_row:
            episodes = "an episode" if len(lost) == 1 else f"{len(lost)} episodes in a row without a turn between them"
            broken = EnvError(
                fault.kind,
                f"environment {session.index} lost {episodes}, more than data.init_args.faults.in_a_row allows "
                f"({self.in_a_row}); the last one: {fault}",
                fault.trace,
            )
            for note in notes:
                broken.add_note(note)
            raise broken from fault
        warn_each(f"{fault}{''.join(f' ({note})' for note in notes)}; its episode is lost")

    async def episode(self, session: Session) -> tuple[list[Turn], str]:
        """Play one whole episode in a fresh session.

        Returns:
            Its turns, and the kind of the fault to which it was lost, empty if it was not.
        """
        samples, lost = await self.samples(session)
        return [turn for sample in samples for turn in sample.turns], lost

    async def samples(self, session: Session) -> tuple[list[Sample], str]:
        """Play one whole episode in a fresh session; as :meth:`episode`, with what was read and said."""
        recorder = Recorder(None, self.grows)
        lost = await self.play(session, recorder)
        self.advance()
        return recorder.samples(), lost
