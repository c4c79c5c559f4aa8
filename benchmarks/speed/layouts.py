"""The tokens that every contender trains on. Imports nothing, since the contenders live in different environments.

Ids are random: what an update costs does not depend on what the tokens say, only on where they are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

IDS = range(100, 40_000)  # ordinary ids of the demo model's vocabulary of 49,152
GLUE = 2  # tokens of the chat template around an observation that follows a reply


@dataclass(frozen=True)
class Case:
    """Lengths of the prompts and replies of a batch."""

    prompt: int  # tokens of a prompt
    shared: int  # leading tokens that all prompts have in common
    reply: int = 8
    turns_per_episode: int = 8

    @property
    def own(self) -> int:
        """Tokens of a prompt after the shared ones: the observation."""
        return self.prompt - self.shared


@dataclass(frozen=True)
class Row:
    """One row as a trainer sees it: a prompt, and after it tokens of which some were sampled."""

    prompt: list[int]
    completion: list[int]
    sampled: list[int]  # 1 where the completion was sampled
    advantages: list[float]  # one for each token of the completion, 0 where it was not sampled


def turn_rows(case: Case, turns: int, seed: int = 0) -> list[Row]:
    """One row for each turn: shared tokens, its own observation, its reply. Neighbours are turns of one episode."""
    draw = random.Random(f"{seed} {case}")
    shared = draw.choices(IDS, k=case.shared)
    rows = []
    for _ in range(turns):
        prompt = [*shared, *draw.choices(IDS, k=case.own)]
        advantages = [draw.gauss(0.0, 1.0) for _ in range(case.reply)]
        rows.append(Row(prompt, draw.choices(IDS, k=case.reply), [1] * case.reply, advantages))
    return rows


def episode_rows(case: Case, turns: int, seed: int = 0) -> list[Row]:
    """The same observations and replies in one row for each episode, every observation within two tokens of glue."""
    singles, rows = turn_rows(case, turns, seed), []
    draw = random.Random(f"glue {seed} {case}")
    for first in range(0, turns, case.turns_per_episode):
        prompt: list[int] = []
        completion: list[int] = []
        sampled: list[int] = []
        advantages: list[float] = []
        for turn in singles[first : first + case.turns_per_episode]:
            glued = [*turn.prompt[case.shared :], *draw.choices(IDS, k=GLUE)]
            if not prompt:
                prompt = [*turn.prompt[: case.shared], *glued]
            else:
                completion += glued
                sampled += [0] * len(glued)
                advantages += [0.0] * len(glued)
            completion += turn.completion
            sampled += turn.sampled
            advantages += turn.advantages
        rows.append(Row(prompt, completion, sampled, advantages))
    return rows
