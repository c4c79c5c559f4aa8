"""Packing: rows with shared token prefixes become one row that computes each prefix once, without padding.

Rows with the common prefix ``p`` and their own suffixes ``s_1 … s_B`` become ``[p, s_1, …, s_B]``, and likewise within
suffixes that begin alike. Every suffix restarts its positions at ``len(p)`` and attends to the prefix and to itself
only, so each token sees exactly what it would see in its own row: results and gradients are those of separate rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_agentrl.models.prefix_tree import PrefixTree, common_prefix_length, lay_out
from lightning_agentrl.types.model_input import ModelInput, check_text_only


@dataclass(frozen=True, slots=True)
class Row:
    """The input of a model as one row, and the positions at which logits or values are computed.

    The hidden state at ``logit_positions[k]`` predicts the next token and carries the value of the state before it.
    """

    input: ModelInput
    logit_positions: tuple[int, ...]

    def __post_init__(self) -> None:
        length = len(self.input)
        if not length or any(not 0 <= position < length for position in self.logit_positions):
            raise ValueError(f"logit positions {self.logit_positions} must lie within a row of {length} ids")

    @property
    def ids(self) -> tuple[int, ...]:
        """The trainer's stream."""
        return self.input.ids

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The ids that the model must read; those after the last logit position are only predicted."""
        return self.input.ids[: self._length]

    @property
    def input_keys(self) -> tuple[int, ...]:
        """The keys of these ids, by which rows share prefixes; see :attr:`ModelInput.keys`."""
        return self.input.keys[: self._length]

    @property
    def _length(self) -> int:
        return max(self.logit_positions, default=0) + 1


@dataclass(frozen=True)
class Packed:
    """The tokens of one forward pass and its R logit positions, in row order: a prefix tree, or rows with padding."""

    ids: Tensor  # [1, N] int64; [B, L] without a tree
    positions: Tensor  # of the same shape
    tree: PrefixTree | None
    logit_positions: Tensor  # [R] int64, index into the flat ids
    targets: Tensor  # [R] int64, the token after the logit position, -1 where the row ends there
    unique_positions: Tensor | None = None  # [U] the distinct logit positions; only with a tree
    padding: Tensor | None = None  # [B, L] 1 on tokens, 0 on padding; only without a tree

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.ids.numel()

    @property
    def padding_tokens(self) -> int:
        """How many of these tokens are padding."""
        return 0 if self.padding is None else int((self.padding == 0).sum())


def pack(rows: Sequence[Row], device: torch.device | str = "cpu", share: bool = True) -> Packed:
    """Pack rows into one, with common prefixes once; or side by side with padding, without ``share``.

    Raises:
        ValueError: a row holds an image; its pixels are not available here.
    """
    check_text_only((row.input for row in rows), "the trainer's model")
    inputs = [row.input_keys for row in rows]  # of text, so these are the ids
    targets = [
        ids[position + 1] if position + 1 < len(ids) else -1
        for ids, positions in ((row.ids, row.logit_positions) for row in rows)
        for position in positions
    ]
    if share:
        layout = lay_out(inputs, device)
        flat = [layout.place(k, position) for k, row in enumerate(rows) for position in row.logit_positions]
        ids, positions, tree, padding = torch.tensor([layout.keys]), layout.tree.positions[None], layout.tree, None
    else:
        width = max(len(ids) for ids in inputs)
        flat = [k * width + position for k, row in enumerate(rows) for position in row.logit_positions]
        ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in inputs])
        positions = torch.arange(width, device=device).expand(len(rows), width)
        padding = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs], device=device)
        tree = None
    return Packed(
        ids=ids.to(device),
        positions=positions,
        tree=tree,
        logit_positions=torch.tensor(flat, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        unique_positions=torch.tensor(sorted(set(flat)), dtype=torch.int64, device=device) if share else None,
        padding=padding,
    )


def plan_micro_batches(rows: Sequence[Row], max_tokens: int, share: bool = True) -> list[list[int]]:
    """Group row indices into micro-batches of at most ``max_tokens`` packed tokens, balanced, similar rows together.

    Rows that do not share are grouped by length, to keep padding small.

    A single row longer than ``max_tokens`` forms its own micro-batch.
    """
    if not rows:
        return []
    inputs = [row.input_keys for row in rows]
    if share:
        # One sort puts rows with long common prefixes next to each other; those of neighbours determine all others.
        order = sorted(range(len(rows)), key=lambda i: inputs[i])
        common = [0] + [common_prefix_length([inputs[a], inputs[b]]) for a, b in pairwise(order)]
    else:
        order = sorted(range(len(rows)), key=lambda i: len(inputs[i]))
        common = []
    lengths = [len(inputs[i]) for i in order]

    def cut(budget: int) -> list[range]:
        return list(_fill_tree(lengths, common, budget) if share else _fill_padded(lengths, budget))

    count = len(cut(max_tokens))
    low, high = 0, max_tokens  # smallest budget that needs no more micro-batches: the balanced one
    while low + 1 < high:
        middle = (low + high) // 2
        if len(cut(middle)) > count:
            low = middle
        else:
            high = middle
    return [[order[place] for place in places] for places in cut(high)]


def _fill_tree(lengths: Sequence[int], common: Sequence[int], budget: int) -> Iterator[range]:
    """Yield runs of sorted rows that take at most ``budget`` tokens each."""
    first = total = 0
    for place, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        if place > first and total + length - shared > budget:
            yield range(first, place)
            first, total = place, 0
        total += length if place == first else length - shared
    yield range(first, len(lengths))


def _fill_padded(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Yield runs of rows, sorted by length, that take at most ``budget`` tokens each, padding included."""
    first = 0
    for place, length in enumerate(lengths):
        if place > first and (place + 1 - first) * length > budget:
            yield range(first, place)
            first = place
    yield range(first, len(lengths))
