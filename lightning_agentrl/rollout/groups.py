"""Group rollouts: whole episodes, several from each start state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.recorder import EpisodeRecorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.collection import Collection
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.types import Rollout, Sample, samples_from_plain, samples_to_plain


@dataclass(frozen=True)
class GroupRollout:
    """Iterations of whole groups; the episodes of a group share environment, task and seed.

    Args:
        size: episodes of a group.
        per_rollout: groups of an iteration over all ranks.
        mini_batches: optimizer steps in each pass over a rollout.
        ahead: groups of later iterations that are begun in this one, to keep environments busy while the longest
            episodes end. They go on with the weights of the next iteration.
        ahead_turns: turns that each of their episodes goes ahead in an iteration.
    """

    size: int = 8
    per_rollout: int = 16
    mini_batches: int = 2
    ahead: int = 0
    ahead_turns: int = 1

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("per_rollout", 1), ("mini_batches", 1), ("ahead", 0), ("ahead_turns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"data.init_args.groups.{name} must be at least {least}, got {getattr(self, name)}")
        if self.mini_batches > self.episodes:
            raise ValueError(
                f"{self.mini_batches} mini-batches need as many episodes, and an iteration has size * per_rollout = "
                f"{self.size} * {self.per_rollout} = {self.episodes}; lower data.init_args.groups.mini_batches"
            )

    @property
    def episodes(self) -> int:
        """Episodes of an iteration over all ranks. Each has a place, the number of its environment in a rollout."""
        return self.size * self.per_rollout

    @property
    def longest_ahead(self) -> int:
        """Iterations from the first turn of a group to the end of its own, at most."""
        return math.ceil(self.ahead / self.per_rollout)

    def place(self, group: int, member: int) -> int:
        """Of an episode among those of its iteration."""
        return group % self.per_rollout * self.size + member

    def places(self, rank: int, world: int) -> list[int]:
        """Those of a rank, in every iteration."""
        return [self.place(group, member) for group in self.coming_home(0, rank, world) for member in range(self.size)]

    def coming_home(self, rollout: int, rank: int, world: int) -> range:
        """Groups of a rank that are complete in the end of this rollout, counted from 0."""
        return range(rollout * self.per_rollout + rank, (rollout + 1) * self.per_rollout, world)

    def going_ahead(self, rollout: int, rank: int, world: int) -> range:
        """Groups of a rank that are played ahead in this rollout."""
        first = (rollout + 1) * self.per_rollout
        return range(first + rank, first + self.ahead, world)

    def check_processes(self, world: int) -> None:
        """Refuse a number of processes that cannot share the groups.

        Raises:
            ValueError: with the key to change.
        """
        for name in ("per_rollout", "ahead"):
            if getattr(self, name) % world:
                raise ValueError(
                    f"{getattr(self, name)} groups cannot be shared evenly by {world} processes, and a group stays on "
                    f"one; change data.init_args.groups.{name} or trainer.devices"
                )


class MakeSession(Protocol):
    """Makes the session of one episode, with an idle environment if one is given."""

    def __call__(self, group: int, member: int, worker: EnvWorker | None) -> Session: ...


class Member:
    """One episode of a group; it has a session while it is running."""

    def __init__(self, recorder: EpisodeRecorder, session: Session | None = None) -> None:
        self.recorder = recorder
        self.session = session

    def over(self) -> bool:
        return self.recorder.ended

    @property
    def samples(self) -> list[Sample]:
        return self.recorder.samples()

    def state_dict(self) -> dict[str, Any]:
        return {
            "session": None if self.session is None else self.session.state_dict(),
            "samples": samples_to_plain(self.samples),
        }


class Groups(Collection):
    """Plays the groups of one rank in their order. What is played with which weights does not depend on time.

    A rollout plays the episodes of its groups to their end, and then those of groups ahead for a fixed number of turns.
    ``at_a_time`` players take the next episode as soon as they are free, so none waits for another.

    Args:
        settings: sizes.
        make_session: makes the session of an episode.
        environment_of: which of the environments the group plays; those of equal numbers are exchanged.
        rank: of this process.
        world: number of ranks.
        at_a_time: episodes played at a time on this rank.
        grows: one growing sample per episode.
        greedy: play one more episode per group without randomness; its score goes to ``Rollout.greedy_scores``.
        collected: rollouts that were collected before.
    """

    unit = "episodes"

    def __init__(
        self,
        settings: GroupRollout,
        make_session: MakeSession,
        environment_of: Callable[[int], int],
        rank: int,
        world: int,
        at_a_time: int,
        grows: bool,
        greedy: bool = False,
        collected: int = 0,
    ) -> None:
        self.settings = settings
        self.make_session = make_session
        self.environment_of = environment_of
        self.rank, self.world = rank, world
        self.at_a_time = at_a_time
        self.grows = grows
        self.greedy = greedy
        self.collected = collected
        self._members: dict[int, list[Member]] = {}  # of groups that were begun and have not come home
        self._idle: dict[int, list[EnvWorker]] = {}

    @property
    def total(self) -> int:
        return len(self._coming_home) * (self.settings.size + self.greedy)

    @property
    def _coming_home(self) -> range:
        return self.settings.coming_home(self.collected, self.rank, self.world)

    @property
    def sessions(self) -> list[Session]:
        return [m.session for members in self._members.values() for m in members if m.session is not None]

    async def collect(self, collector: Collector) -> Rollout:
        """Samples by group and episode. The scores of greedy episodes are those of the weights that end the group."""
        home = self._coming_home
        ahead = self.settings.going_ahead(self.collected, self.rank, self.world)
        greedy: dict[int, float] = {}
        parts: list[Callable[[], Coroutine[Any, Any, None]]] = []
        for group in home:
            parts += [partial(self._end, group, i, collector) for i in range(self.settings.size)]
            parts += [partial(self._play_greedily, group, greedy, collector)] * self.greedy
        parts += [partial(self._play, g, i, self.settings.ahead_turns, collector) for g in ahead for i in self._numbers]
        await self._run(parts)
        self.collected += 1
        samples = {group: [s for member in self._members.pop(group) for s in member.samples] for group in home}
        rollout = Rollout.from_samples([sample for of_group in samples.values() for sample in of_group])
        if not self.greedy:
            return rollout
        scores = [greedy[group] for group, of_group in samples.items() for _ in of_group]
        return rollout.union(greedy_scores=torch.tensor(scores, dtype=torch.float32))

    @property
    def _numbers(self) -> range:
        return range(self.settings.size)

    async def _run(self, parts: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Play them in their order, so many at a time."""
        waiting = iter(parts)

        async def player() -> None:
            for part in waiting:  # shared between the players: each takes the next one
                await part()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.at_a_time, len(parts))):
                tasks.create_task(player())

    async def _end(self, group: int, number: int, collector: Collector) -> None:
        await self._play(group, number, None, collector)
        collector.advance()

    async def _play(self, group: int, number: int, turns: int | None, collector: Collector) -> None:
        """At most so many turns of an episode; None: to its end."""
        member = self._member(group, number)
        if member.over():
            return
        if member.session is None:
            member.session = self._new_session(group, number)
        member.recorder.go_on(turns)
        await collector.part(member.session, member.recorder)
        if member.over():
            self._release(group, member.session)
            member.session = None

    async def _play_greedily(self, group: int, scores: dict[int, float], collector: Collector) -> None:
        session = self._new_session(group, 0)
        try:
            turns = await replace(collector, temperature=0.0).episode(session)  # counts as one more done
        finally:
            self._release(group, session)
        scores[group] = sum(turn.reward for turn in turns)

    def _member(self, group: int, number: int) -> Member:
        if group not in self._members:
            self._members[group] = [Member(EpisodeRecorder(group, self.grows)) for _ in self._numbers]
        return self._members[group][number]

    def _new_session(self, group: int, number: int) -> Session:
        idle = self._idle.get(self.environment_of(group))
        return self.make_session(group, number, idle.pop() if idle else None)

    def _release(self, group: int, session: Session) -> None:
        self._idle.setdefault(self.environment_of(group), []).append(session.worker)

    def state_dict(self) -> dict[int, Any]:
        """The groups that were begun and have not come home, by number: their turns, and sessions where they go on."""
        return {group: [member.state_dict() for member in members] for group, members in self._members.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        for group, members in state.items():
            if group % self.world == self.rank:
                self._members[group] = [self._loaded(group, i, saved) for i, saved in enumerate(members)]

    def _loaded(self, group: int, number: int, saved: Mapping[str, Any]) -> Member:
        member = Member(EpisodeRecorder(group, self.grows, samples_from_plain(saved["samples"])))
        if saved["session"] is not None:
            member.session = self._new_session(group, number)
            member.session.load_state_dict(saved["session"])
        return member

    def close(self) -> None:
        idle = [worker for workers in self._idle.values() for worker in workers]
        for worker in [*(session.worker for session in self.sessions), *idle]:
            worker.close()
        self._members, self._idle = {}, {}
