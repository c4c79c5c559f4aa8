"""Making sessions: what those of training, validation and checks have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.episode import Moment
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.prompts.renderer import ChatRenderer


@dataclass(frozen=True)
class SessionMaker:
    """Everything that a session takes besides its number and the seeds of its episodes."""

    pool: EnvPool
    renderer: ChatRenderer
    memory: Memory
    seed: int  # of the run
    moments: dict[tuple[int, int, int], Moment] | None = None  # takes the states of sessions that may be forked
    context_length: int | None = None  # tokens that the model can read; None: any number

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
        """Make a session in an environment of the pool.

        Args:
            kind: of the environment, its place in the list of sources.
            index: number of the session over all ranks.
            episode_seed: seed of the n-th episode.
            pictures: keep a picture of each turn, where there is something to see.
            first_episode: number of the first episode.
            held_out: whether it plays what validation plays.
            place: number among the sessions that play at the same time; ``index`` when not given.
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

    def end(self, session: Session, kind: int, held_out: bool = False) -> None:
        """Leave the environment of a session that is over to the next one."""
        self.pool.give_back(kind, session.worker, held_out)
