"""Packing: rows with shared token prefixes become one row that computes each prefix once, without padding.

Rows with the common prefix ``p`` and their own suffixes ``s_1 … s_B`` become ``[p, s_1, …, s_B]``, and likewise for
suffixes with a common prefix. Positions of every suffix restart at ``len(p)``, and each suffix attends to the prefix
and itself only. So each token sees exactly the tokens of its own row: results and gradients are the same as for
separate rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from lightning_agentrl.models.prefix_tree import PrefixTree, lay_out, shared_length
from lightning_agentrl.models.vision import FamilyReader, PackedImages, find_tokens
from lightning_agentrl.types.model_input import Row, check_text_only
from lightning_agentrl.types.transfer import integers


@dataclass(frozen=True)
class Packed:
    """Inputs of one forward pass, as a prefix tree or as padded rows, with its R logit positions in row order."""

    ids: Tensor  # [1, N] int64; [B, L] without a tree
    positions: Tensor  # same shape as ids, or [3, …] for models with positions in time, rows and columns
    tree: PrefixTree | None  # None: padded rows
    logit_positions: Tensor  # [R] int64, index into the flat ids
    targets: Tensor  # [R] int64, the token after the logit position, -1 at the end of a row
    unique_positions: Tensor | None = None  # [U] the distinct logit positions; only with a tree
    padding: Tensor | None = None  # [B, L] 1 on tokens, 0 on padding; only without a tree
    images: PackedImages | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.ids.numel()


def pack(
    rows: Sequence[Row],
    device: torch.device | str = "cpu",
    share: bool = True,
    reader: FamilyReader | None = None,
    feed_tower: bool = False,
) -> Packed:
    """Pack rows into one row that holds common prefixes once or, without ``share``, into padded rows.

    Args:
        rows: rows to pack.
        device: device of the returned tensors.
        share: whether to compute common prefixes once.
        reader: image reader of the model; None for a text-only model.
        feed_tower: whether to add a blank image if the rows have no images, so that the vision tower gets gradients.

    Raises:
        ValueError: a row has an image that the model cannot read or whose pixels are missing.
    """
    if reader is None:
        check_text_only(map(attrgetter("input"), rows), "the trainer's model")
    inputs = [row.input_keys for row in rows]
    flat: list[int] = []  # logit positions in the layout
    targets: list[int] = []
    for row in rows:
        following = (*row.input.ids, -1)
        targets += [following[position + 1] for position in row.logit_positions]
    if share:
        layout = lay_out(inputs, device)
        for k, row in enumerate(rows):
            flat += layout.find(k, row.logit_positions)
        keys, positions, ends, shape = layout.keys, layout.tree.positions, layout.tree.ends, (1, -1)
        tree, padding = layout.tree, None
    else:
        width = max(len(ids) for ids in inputs)
        flat = [k * width + position for k, row in enumerate(rows) for position in row.logit_positions]
        keys = [key for row in inputs for key in (*row, *[0] * (width - len(row)))]
        positions = torch.arange(width, device=device).repeat(len(rows))
        ends, shape = torch.arange(1, len(rows) + 1).repeat_interleave(width) * width, (len(rows), width)
        padding = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in inputs], device=device)
        tree = None
    tokens = find_tokens(keys, positions, ends, (row.images for row in rows), reader, feed_tower)
    return Packed(
        ids=tokens.ids.view(shape),
        positions=tokens.positions.view(*tokens.positions.shape[:-1], *shape),
        tree=None if tree is None else replace(tree, starts=tokens.starts),
        logit_positions=integers(flat, device),
        targets=integers(targets, device),
        unique_positions=integers(sorted(set(flat)), device) if share else None,
        padding=padding,
        images=tokens.images,
    )


def plan_micro_batches(
    rows: Sequence[Row], max_tokens: int, share: bool = True, patches_per_token: int = 0
) -> list[list[int]]:
    """Group row indices into balanced micro-batches of at most ``max_tokens`` packed tokens, similar rows together.

    Without ``share``, rows are grouped by length to keep padding small. Patches of each distinct image in a micro-batch
    count as tokens. A single row longer than ``max_tokens`` forms its own micro-batch.

    Args:
        rows: rows to group.
        max_tokens: largest number of tokens in a micro-batch.
        share: whether common prefixes are computed once.
        patches_per_token: number of image patches that the vision tower merges into one token; 0 without a tower.
    """
    if not rows:
        return []
    inputs = [row.input_keys for row in rows]
    if share:
        # Sorting puts rows with long common prefixes next to each other. The common prefixes of neighbors determine the
        # common prefixes of all pairs.
        order = sorted(range(len(rows)), key=inputs.__getitem__)
        common = [0, *(shared_length(inputs[a], inputs[b]) for a, b in pairwise(order))]
    else:
        order = sorted(range(len(rows)), key=lambda i: len(inputs[i]))
        common = []
    lengths = [len(inputs[i]) for i in order]
    patches = [_patches(rows[i], patches_per_token) for i in order] if patches_per_token else [Patches()] * len(order)
    fill = partial(_fill_tree, lengths, common, patches) if share else partial(_fill_padded, lengths, patches)
    count = len([*fill(max_tokens)])
    if count == 1:
        return [order]
    # Bisect for the smallest budget that does not need more micro-batches: this budget balances the micro-batches.
    low, high = 0, max_tokens
    while low + 1 < high:
        middle = (low + high) // 2
        if len([*fill(middle)]) > count:
            low = middle
        else:
            high = middle
    return [[order[place] for place in places] for places in fill(high)]


Patches = dict[str, int]  # number of patches of each distinct image, by digest


def _patches(row: Row, per_token: int) -> Patches:
    return {image.digest: image.tokens * per_token for image in row.images}


def _fill_tree(
    lengths: Sequence[int], common: Sequence[int], patches: Sequence[Patches], budget: int
) -> Iterator[range]:
    """Yield ranges of sorted rows that take at most ``budget`` tokens each when packed."""
    first = total = 0
    seen = Patches()
    for place, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        if place > first and total + length - shared + _new(patches[place], seen) > budget:
            yield range(first, place)
            first, total, seen = place, 0, {}
        total += (length if place == first else length - shared) + _new(patches[place], seen)
        seen |= patches[place]
    yield range(first, len(lengths))


def _fill_padded(lengths: Sequence[int], patches: Sequence[Patches], budget: int) -> Iterator[range]:
    """Yield ranges of rows, sorted by length, that take at most ``budget`` tokens each, padding included."""
    first = total = 0  # `total` counts patches of distinct images
    seen = Patches()
    for place, length in enumerate(lengths):
        if place > first and (place + 1 - first) * length + total + _new(patches[place], seen) > budget:
            yield range(first, place)
            first, total, seen = place, 0, {}
        total += _new(patches[place], seen)
        seen |= patches[place]
    yield range(first, len(lengths))


def _new(patches: Patches, seen: Patches) -> int:
    return sum(count for digest, count in patches.items() if digest not in seen) if patches else 0
