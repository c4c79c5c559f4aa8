"""Making sessions: which environment a number plays and from which seeds, in training and in validation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from lightning_agentrl.episodes.checks import check_prompt
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.seeds import derive_seed, held_out_place
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sources import EnvMix, Source
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout.groups import GroupRollout


@dataclass(frozen=True)
class SessionMaker:
    """Everything a session needs besides its number."""

    mix: EnvMix
    groups: GroupRollout | None  # None: the episodes of an environment follow each other
    renderer: ChatRenderer
    memory: Memory
    executor: Executor
    seed: int

    def fixed(self, index: int, pictures: bool = False) -> Session:
        """The session of an environment whose episodes follow each other."""
        return self._make(
            self.mix.source(index), index, lambda episode: derive_seed(self.seed, index, episode), pictures=pictures
        )

    def of_group(self, group: int, member: int, worker: EnvWorker | None = None, pictures: bool = True) -> Session:
        """The session of one episode of a group. It starts as all of its group do; replies have seeds of their own."""
        assert self.groups is not None
        place, rollout = self.groups.place(group, member), group // self.groups.per_rollout
        seed, source = derive_seed(self.seed, group), self.mix.source(group)
        return self._make(source, place, lambda _episode: seed, worker, pictures=pictures, first_episode=rollout)

    def held_out(self, seed: int, episode_seed: Callable[[int], int]) -> Session:
        """The session of a validation episode."""
        source = self.mix.source(held_out_place(seed))
        return self._make(source, seed, episode_seed, source.make_worker(self.executor, held_out=True))

    def first(self, index: int) -> Session:
        """An environment at the start of its first training episode, apart from those that are trained on."""
        if self.groups is None:
            session = self.fixed(index)
        else:
            session = self.of_group(*divmod(index, self.groups.size), pictures=False)
        session.begin()
        return session

    def check_prompts(self, interaction: Interaction, context_length: int) -> None:
        """Try a prompt of each kind of environment.

        Raises:
            ValueError: one sentence with the key to change.
        """
        for source in self.mix.sources:
            session = self._make(source, 0, lambda _episode: 0)
            try:
                check_prompt(session, interaction, context_length)
            finally:
                session.close()

    def _make(
        self,
        source: Source,
        index: int,
        episode_seed: Callable[[int], int],
        worker: EnvWorker | None = None,
        pictures: bool = False,
        first_episode: int = 0,
    ) -> Session:
        return Session(
            index,
            source.make_worker(self.executor) if worker is None else worker,
            episode_seed,
            self.renderer,
            self.memory,
            pictures=pictures,
            first_episode=first_episode,
        )
