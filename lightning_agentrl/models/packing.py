"""Packing: rows that share a token prefix become one row that computes the prefix once, without padding.

``B`` rows with the common prefix ``p`` and own suffixes ``s_1 … s_B`` become ``[p, s_1, …, s_B]``. Every suffix
restarts its positions at ``len(p)`` and attends to the prefix and to itself only (a tree mask), so each token sees
exactly what it would see in its own row: results and gradients are those of the separate rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one row, and the positions whose hidden states are read.

    The hidden state at ``reads[k]`` predicts token ``reads[k] + 1`` and carries the value of the state before it.
    """

    ids: tuple[int, ...]
    reads: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ids or any(not 0 <= read < len(self.ids) for read in self.reads):
            raise ValueError(f"reads {self.reads} must be positions within a row of {len(self.ids)} ids")

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The ids that the model must read; what follows the last read-out is only ever predicted."""
        return self.ids[: max(self.reads, default=0) + 1]


@dataclass(frozen=True)
class Packed:
    """One packed row of N tokens and its R read-outs (in row order)."""

    ids: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64
    mask: Tensor  # [1, 1, N, N] bool, True where the query (first N) may look at the key (second N)
    reads: Tensor  # [R] int64, index into N
    targets: Tensor  # [R] int64, the token after the read-out, -1 where the row ends there


def common_prefix_length(rows: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest token prefix that all rows share."""
    low, high = min(rows), max(rows)  # the lexicographic extremes differ first
    length = 0
    for a, b in zip(low, high, strict=False):
        if a != b:
            break
        length += 1
    return length


def pack(rows: Sequence[Row], device: torch.device | str = "cpu") -> Packed:
    """Pack rows into one, their common prefix first and once."""
    inputs = [row.input_ids for row in rows]
    prefix = common_prefix_length(inputs)
    ids = list(inputs[0][:prefix])
    positions = list(range(prefix))
    branch = [0] * prefix  # 0 for the prefix, k for the suffix of the k-th row
    reads: list[int] = []
    targets: list[int] = []
    for k, row in enumerate(rows, start=1):
        start = len(ids)
        reads += [read if read < prefix else start + read - prefix for read in row.reads]
        targets += [row.ids[read + 1] if read + 1 < len(row.ids) else -1 for read in row.reads]
        suffix = inputs[k - 1][prefix:]
        ids += suffix
        positions += range(prefix, len(inputs[k - 1]))
        branch += [k] * len(suffix)
    branch_N = torch.tensor(branch, device=device)
    order_N = torch.arange(len(ids), device=device)
    related = (branch_N[:, None] == branch_N) | (branch_N == 0)
    mask = related & (order_N[:, None] >= order_N)
    return Packed(
        ids=torch.tensor([ids], device=device),
        positions=torch.tensor([positions], device=device),
        mask=mask[None, None],
        reads=torch.tensor(reads, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
    )


def plan_micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Group row indices into micro-batches of at most ``max_tokens`` packed tokens, balanced, similar rows together.

    A single row longer than ``max_tokens`` forms its own micro-batch.
    """
    inputs = [row.input_ids for row in rows]
    order = sorted(range(len(rows)), key=lambda i: inputs[i])
    # One sort puts rows with long common prefixes next to each other; neighbours tell all common prefixes.
    shared = [common_prefix_length([inputs[a], inputs[b]]) for a, b in pairwise(order)]
    lengths = [len(ids) for ids in inputs]
    count = len(list(_fill(lengths, order, shared, max_tokens)))
    low, high = 0, max_tokens  # smallest budget that needs no more micro-batches: the balanced one
    while low + 1 < high:
        middle = (low + high) // 2
        if len(list(_fill(lengths, order, shared, middle))) > count:
            low = middle
        else:
            high = middle
    return list(_fill(lengths, order, shared, high))


def _fill(lengths: Sequence[int], order: Sequence[int], shared: Sequence[int], budget: int) -> Iterator[list[int]]:
    group: list[int] = []
    prefix = total = 0  # common prefix of the group, and the sum of its full row lengths
    for place, i in enumerate(order):
        length = lengths[i]
        joined = min(prefix, shared[place - 1]) if group else length
        if group and total + length - joined * len(group) > budget:
            yield group
            group, prefix, total = [], 0, 0
            joined = length
        group.append(i)
        prefix, total = joined, total + length
    if group:
        yield group
