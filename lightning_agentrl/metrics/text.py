"""Repetition and diversity of replies: the first signs that an agent has stopped thinking."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_agentrl.metrics.numbers import ExactMetric
from lightning_agentrl.types import Turn

_WORD = re.compile(r"\w+")
AT_ONCE = 4096  # members of sets that are compared


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def bigrams(text: str) -> list[str]:
    """Return pairs of neighbouring words, without case and punctuation."""
    return [f"{a} {b}" for a, b in pairwise(words(text))]


class TextMetrics(ExactMetric):
    """Text statistics of the replies of a rollout, over all ranks.

    * ``distinct_in_turn``: distinct word pairs of a reply among all of its word pairs; low: it repeats itself
    * ``distinct_across_turns``: the same over all replies together; low: every reply says the same
    * ``thought_copies``: share of thoughts that equal the thought of the previous turn of their episode
    * ``thought_diversity``: mean distance (1 - shared / all word pairs) between the last thoughts of two environments
    """

    sums: Tensor
    replies: list[Tensor] | Tensor
    thoughts: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        # distinct pairs within turns, pairs, copied thoughts, thoughts with a predecessor
        self.add_state("sums", default=torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("replies", default=[], dist_reduce_fx="cat")  # [P] hash of each word pair
        self.add_state("thoughts", default=[], dist_reduce_fx="cat")  # [Q, 2] environment and hash, distinct

    def update(self, turns: Sequence[Turn]) -> None:
        pairs = [bigrams(turn.reply) for turn in turns]
        copies = list(_copies(turns))
        sums = [sum(len(set(p)) for p in pairs), sum(map(len, pairs)), sum(copies), len(copies)]
        device = self.sums.device
        self.sums += torch.tensor(sums, dtype=torch.float64, device=device)
        hashes = [_hash(pair) for found in pairs for pair in found]
        rows = [(turn.env, _hash(pair)) for turn in _last_thoughts(turns) for pair in set(bigrams(turn.thought))]
        assert isinstance(self.replies, list)
        assert isinstance(self.thoughts, list)
        self.replies.append(torch.tensor(hashes, dtype=torch.int64, device=device))
        self.thoughts.append(torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 2))

    def compute(self) -> dict[str, float]:
        """Return the statistics that are defined."""
        distinct, pairs, copies, thoughts = self.sums.tolist()
        numbers = {}
        if pairs:
            numbers["text/distinct_in_turn"] = distinct / pairs
            numbers["text/distinct_across_turns"] = len(_joined(self.replies).unique()) / pairs
        if thoughts:
            numbers["text/thought_copies"] = copies / thoughts
        diversity = mean_distance(_joined(self.thoughts).reshape(-1, 2).cpu())
        if diversity is not None:
            numbers["text/thought_diversity"] = diversity
        return numbers


def mean_distance(members_Q2: Tensor) -> float | None:
    """Return the mean Jaccard distance over all pairs of sets, given as rows (set, member); None for fewer than 2."""
    sets, row = members_Q2[:, 0].unique(return_inverse=True)
    if len(sets) < 2:
        return None
    members, column = members_Q2[:, 1].unique(return_inverse=True)
    sizes, shared_EE = row.bincount().double(), torch.zeros(len(sets), len(sets), dtype=torch.float64)
    for first in range(0, len(members), AT_ONCE):  # a product of sparse tensors would be one line, and warn of itself
        here = (column >= first) & (column < first + AT_ONCE)
        member_EW = torch.zeros(len(sets), min(AT_ONCE, len(members) - first), dtype=torch.float64)
        member_EW[row[here], column[here] - first] = 1
        shared_EE += member_EW @ member_EW.T
    distance_EE = 1 - shared_EE / (sizes[:, None] + sizes[None, :] - shared_EE)
    return float(distance_EE.sum() / (len(sets) * (len(sets) - 1)))  # the diagonal is 0


def _copies(turns: Sequence[Turn]) -> Iterator[bool]:
    """Yield, for each thought whose previous turn is in the rollout too, whether it is the same."""
    thoughts = {(turn.env, turn.episode, turn.index): turn.thought for turn in turns}
    for (env, episode, index), thought in thoughts.items():
        before = thoughts.get((env, episode, index - 1))
        if thought and before is not None:
            yield thought == before


def _last_thoughts(turns: Sequence[Turn]) -> list[Turn]:
    """Return the last turn with a thought of each environment."""
    ordered = sorted(turns, key=lambda turn: (turn.episode, turn.index))
    return list({turn.env: turn for turn in ordered if turn.thought}.values())


def _hash(text: str) -> int:
    """Return a hash that is equal on every rank and in every process, unlike Python's own."""
    data = text.encode()
    return zlib.crc32(data) << 31 ^ zlib.adler32(data)


def _joined(state: list[Tensor] | Tensor) -> Tensor:
    """Return a state as one tensor, before or after it was gathered."""
    return torch.cat(state) if isinstance(state, list) else state
