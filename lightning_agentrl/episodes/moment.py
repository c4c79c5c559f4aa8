"""A moment: the state before a turn, from which an episode can be played on."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_agentrl.prompts.memory import PastTurn
from lightning_agentrl.types import ModelInput, Segment


@dataclass(frozen=True)
class Moment:
    """A session before one of its turns.

    ``past`` and ``actions`` are the lists of the running episode, which only grow, so no turn is copied; what belongs
    to the moment are the first ``turns`` items of ``past`` and the first ``steps`` of ``actions``.
    """

    index: int  # of the environment
    first_episode: int
    episode: int
    seed: int  # of the episode
    turn: int  # number of the turn, as it is recorded
    turns_taken: int
    turns: int
    steps: int
    past: list[PastTurn]
    actions: list[str]
    fingerprint: str  # of the observation
    context: tuple[Segment, ...]
    reply_closed: bool
    episode_return: float
    reply_tokens: int
    unread: tuple[int, int]
    prompt: ModelInput

    @property
    def key(self) -> tuple[int, int, int]:
        return self.index, self.episode, self.turn
