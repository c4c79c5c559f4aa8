"""Players: create sessions of environments and play many of them concurrently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import warn_each
from lightning_agentrl.episodes.episode import Moment
from lightning_agentrl.episodes.interaction import WHOLE_EPISODE_TURNS, Interaction
from lightning_agentrl.episodes.prompt_check import check_prompt
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import TOO_LONG, Session
from lightning_agentrl.errors import EnvError
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptTooLongError
from lightning_agentrl.stalls import reporting, waiting_for
from lightning_agentrl.types import ModelInput, Rollout, Sample, StopReason

NAMED = 8  # largest number of environments that a warning lists
# The share of lost episodes is computed over the last WINDOW episodes or a larger rollout, from LEAST episodes on.
WINDOW, LEAST = 100, 20

Part = Callable[[], Coroutine[Any, Any, object]]  # part of a collection, such as an episode


@dataclass(frozen=True)
class FaultLimits:
    """Limits on episodes that are lost to faults of environments; beyond them the run stops.

    Args:
        in_a_row: number of consecutive episodes that one environment may lose without a turn between them, for example
            if ``reset`` always fails.
        share: largest share of lost episodes among the last 100 of all environments, or among all episodes of the last
            rollout if there are more; the limit applies from 20 episodes on.
    """

    in_a_row: int = 5
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"data.init_args.faults.share must be between 0 and 1, got {self.share}")

    def count(self, before: Sequence[bool], rollout: Rollout) -> list[bool]:
        """Return whether each of the last episodes of all ranks was lost. Every rank must call this method.

        Args:
            before: whether each of the episodes before this rollout was lost.
            rollout: rollout of this rank.

        Raises:
            EnvError: too many episodes are lost, or the rollout has no turn; raised on all ranks.
        """
        own: list[bool] = []
        for turn in rollout.turns:
            own += [True] * len(turn.lost)
            if turn.done and turn.stop is not StopReason.ENV_FAULT:
                own.append(False)
        parts = all_gather((own, len(rollout)))
        if not any(rows for _, rows in parts):
            raise EnvError("lost", "the environments failed in all groups of this rollout")
        # The episodes are not in order of time, so all episodes of a rollout are kept.
        added = [one for part, _ in parts for one in part]
        last = [*before, *added][-max(WINDOW, len(added)) :]
        if len(last) >= LEAST and sum(last) > self.share * len(last):
            raise EnvError(
                "lost",
                f"{sum(last)} of the last {len(last)} episodes were lost to faults of their environments, more than "
                f"the share of {self.share:g} that data.init_args.faults.share allows; the warnings above describe the "
                "faults",
            )
        return last


class Watchdog:
    """Watchdog that warns at intervals while no session makes progress.

    Progress is a call to an environment or judge, its answer, and the start and end of a session's collection.

    Args:
        seconds: time without progress before a warning, and between warnings; 0: no warnings.
        engine: name of the engine, for warnings.
    """

    def __init__(self, seconds: float, engine: str) -> None:
        self.seconds = seconds
        self.engine = engine
        self._sessions: list[Session] = []
        self._changed_at = time.monotonic()

    def on_guard(self, stage: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context that watches from a separate thread, since a stuck call may also block the event loop.

        Args:
            stage: function that returns the running stage.
        """
        self._changed_at = time.monotonic()
        return reporting(self._state, self.seconds, stage)

    @contextmanager
    def watching(self, session: Session) -> Iterator[None]:
        """Watch this session inside the context."""
        self._sessions.append(session)
        self._changed_at = time.monotonic()
        try:
            yield
        finally:
            self._sessions.remove(session)
            self._changed_at = time.monotonic()

    def _state(self) -> tuple[float, str]:
        """Return the time of the last progress, and a description of what the sessions are waiting for."""
        sessions, moved_at = list(self._sessions), self._changed_at  # copying a list is atomic
        calls: dict[str, list[int]] = {}
        for session in sessions:
            calls.setdefault(session.worker.call, []).append(session.index)
        sampled = calls.pop("", [])
        awaited = [f"{call} of {_environments(numbers)}" for call, numbers in sorted(calls.items())]
        if sampled:
            awaited.append(f"replies of {self.engine} to {_environments(sampled)}")
        return max([moved_at, *(session.worker.moved_at for session in sessions)]), " and for ".join(awaited)


def _environments(numbers: list[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)[:NAMED]))
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"environment{'s' if len(numbers) > 1 else ''} {listed}{more}"


@dataclass(frozen=True)
class Player:
    """Creates sessions in the environments of a pool and plays them with an engine.

    Args:
        pool: pool of environments.
        renderer: renderer of prompts.
        memory: memory, which selects what a prompt shows of past turns.
        interaction: turn loop.
        engine: sampler of replies.
        seed: seed of the run.
        temperature: temperature of sampling.
        context_length: number of tokens that the model can read; None means no limit.
        faults: limits on lost episodes.
        moments: dictionary that collects the states of sessions for forks; None: no forks.
        watchdog: watchdog that warns if sessions are stuck.
    """

    pool: EnvPool
    renderer: ChatRenderer
    memory: Memory
    interaction: Interaction
    engine: Engine
    seed: int
    temperature: float = 1.0
    context_length: int | None = None
    faults: FaultLimits = FaultLimits()
    moments: dict[tuple[int, int, int], Moment] | None = None
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(0, ""))

    def session(
        self,
        kind: int,
        index: int,
        episode_seed: Callable[[int], int],
        pictures: bool = False,
        first_episode: int = 0,
        held_out: bool = False,
        place: int | None = None,
    ) -> Session:
        """Create a session in an environment of the pool.

        Args:
            kind: index of the environment's source.
            index: index of the session over all ranks.
            episode_seed: function that returns the seed of the n-th episode.
            pictures: whether to store a picture of each turn, if the environment draws pictures.
            first_episode: index of the first episode.
            held_out: whether the session plays held-out episodes.
            place: index among the sessions that play at the same time. Default: ``index``.
        """
        source = self.pool.sources[kind]
        return Session(
            index,
            self.pool.take(kind, held_out),
            episode_seed,
            self.renderer,
            self.memory,
            pictures=pictures,
            first_episode=first_episode,
            judge=source.judge,
            moments=self.moments,
            place=place,
            context_length=self.context_length,
        )

    def check_prompts(self, context_length: int) -> list[ModelInput]:
        """Reset an environment of each source, check its first prompt, and return these prompts.

        Args:
            context_length: number of tokens that all models can read.

        Raises:
            ValueError: a prompt cannot work; the message names the key to change.
        """
        template, first = self.renderer.template, []
        if template.folds_system:
            rank_zero_info(f"{template.name} has no system role; system text begins the first user message instead")
        for kind, source in enumerate(self.pool.sources):
            session = self.session(kind, 0, lambda _episode: 0)
            try:
                with waiting_for(f"the first reset of {source.name}", "setup"):
                    first.append(check_prompt(session, self.interaction, context_length))
            finally:
                self.pool.give_back(kind, session.worker)
        return first

    async def play(self, session: Session, recorder: Recorder) -> str:
        """Play a session until the recorder is full.

        If an environment fails in all retries, its episode ends at the last turn before the fault. If the recorder
        accepts further episodes, the next episode begins, and the fault is recorded in a turn.

        Returns:
            The kind of the fault to which the recorder's only episode was lost; empty if it was not lost.

        Raises:
            EnvError: too many episodes are lost in a row.
            ValueError: the interaction records no turn.
        """
        if not recorder.goes_on and self.interaction.max_turns is None:
            recorder.longest = WHOLE_EPISODE_TURNS
        with self.watchdog.watching(session):
            while not recorder.full:
                recorded = recorder.recorded
                try:
                    await self.interaction.run(session, self.engine, recorder, self.temperature, self.seed)
                    if recorder.recorded == recorded:
                        raise ValueError(
                            f"`run` of {type(self.interaction).__name__} has returned without recording a turn; it "
                            "must record turns until the recorder is full (key data.init_args.interaction)"
                        )
                    session.worker.lost_seeds.clear()
                except (EnvError, PromptTooLongError) as error:
                    if recorder.recorded > recorded:
                        session.worker.lost_seeds.clear()
                    fault = error if isinstance(error, EnvError) else EnvError(TOO_LONG, str(error))
                    if kind := self._end_episode(session, recorder, fault):
                        return kind
        if recorder.longest is not None and recorder.recorded >= recorder.longest:
            recorder.truncate(StopReason.MAX_TURNS, session.last_state, ())
        return ""

    def _end_episode(self, session: Session, recorder: Recorder, fault: EnvError) -> str:
        """End an episode that cannot continue; return the kind of the fault if it was the recorder's only episode."""
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
            EnvError: the environment has lost too many episodes in a row.
        """
        lost = session.worker.lost_seeds
        lost.add(session.episode.seed)
        notes = getattr(fault, "__notes__", ())
        if len(lost) > self.faults.in_a_row:
            episodes = "an episode" if len(lost) == 1 else f"{len(lost)} episodes in a row without a turn between them"
            broken = EnvError(
                fault.kind,
                f"environment {session.index} lost {episodes}, more than data.init_args.faults.in_a_row allows "
                f"({self.faults.in_a_row}); the last one: {fault}",
                fault.trace,
            )
            for note in notes:
                broken.add_note(note)
            raise broken from fault
        warn_each(f"{fault}{''.join(f' ({note})' for note in notes)}; its episode is lost")

    async def play_episode(self, session: Session) -> tuple[list[Sample], str]:
        """Play one whole episode in a new session.

        Returns:
            The samples, and the kind of the fault to which the episode was lost; empty if it was not lost.
        """
        recorder = Recorder(None, self.memory.grows)
        lost = await self.play(session, recorder)
        return recorder.samples(), lost


async def play_parts(parts: Sequence[Part], at_a_time: int, engine: Engine) -> None:
    """Run parts in order, ``at_a_time`` parts concurrently; the next part begins as soon as a part has ended.

    Each concurrent task enters a context of the engine, so that the engine knows how many tasks send requests.
    """
    waiting = iter(parts)

    async def play(seat: AbstractContextManager) -> None:
        with seat:
            for part in waiting:  # the iterator is shared: each task takes the next part
                try:
                    await part()
                except asyncio.CancelledError as left:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # A user's code raised this error. A task group would ignore it, and turns would be missing.
                    sentence = (
                        "code of an environment, interaction or judge raised CancelledError without being canceled"
                    )
                    raise RuntimeError(sentence) from left

    with engine.seats(min(at_a_time, len(parts))) as seats:
        async with asyncio.TaskGroup() as tasks:
            for seat in seats:
                tasks.create_task(play(seat))
