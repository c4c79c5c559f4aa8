"""Prefix trees: token rows in one layout that holds common prefixes only once.

The branches are in depth-first order. A branch holds the tokens that all rows below it share, so a token sees all
branches above its own, and its own branch up to itself. The tokens below a branch follow the branch directly, so a
subtree is an interval: token ``i`` sees token ``j`` exactly if ``j <= i < end(j)``, with ``end(j)`` the end of ``j``'s
subtree. For a model whose images are bidirectional, the interval of each image token starts at the first token of its
image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, itemgetter

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from lightning_agentrl.models.attention.flash import Level, Span, Tiles, lay_levels, lay_tiles
from lightning_agentrl.models.mixers.walk import Walk, lay_walk
from lightning_agentrl.types.transfer import integers

Keys = tuple[int, ...]  # one key per token of a row; equal keys mean equal content, see :attr:`ModelInput.keys`

DENSE_TOKENS = 192  # largest subtree that is computed by one call with a dense mask
BLOCK = 128  # side of a block of FlexAttention
PAIRS_AT_A_TIME = 2**25  # pairs of queries and keys held in memory while the block mask is computed


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens ``start`` to ``stop`` of the layout; the subtree below these tokens ends at ``end``.

    ``copies`` consecutive leaves of equal length are stored as one branch. ``root`` marks branches without a parent.
    """

    start: int
    stop: int
    end: int
    root: bool
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """One call of an attention kernel: keys ``start`` to ``stop`` and queries ``start`` to ``end``.

    Without a bias, queries see keys causally, and queries after the last key see all keys. ``copies`` is as in
    :class:`Branch`.
    """

    start: int
    stop: int
    end: int
    root: bool  # queries see no keys outside the block
    copies: int = 1
    bias: Tensor | None = None  # [L, L] float32, 0 where the query may attend to the key, -inf elsewhere


@dataclass(frozen=True)
class PrefixTree:
    """N tokens in branches, in depth-first order; each branch begins where the previous branch stops."""

    branches: tuple[Branch, ...]
    ends: Tensor  # [N] int64, end of the subtree of each token's branch
    positions: Tensor  # [N] int64, position of each token within its rows
    depth: int  # tokens of the longest row
    # [N] int64, index of the first token that attends to each token; None: the token itself.
    starts: Tensor | None = None

    def mask(self, window: int | None = None, past: int = 0) -> Tensor:
        """Return a mask [N, P + N], True if the query may attend to the key; all queries see P common past tokens."""
        count, device = len(self.ends), self.ends.device
        order = torch.arange(count, device=device)
        mask = (order[:, None] >= (order if self.starts is None else self.starts)) & (order[:, None] < self.ends)
        mask = torch.cat([mask.new_ones(count, past), mask], 1)
        if window is not None:
            positions = torch.cat([torch.arange(-past, 0, device=device), self.positions])
            mask &= self.positions[:, None] - positions < window
        return mask

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return the block mask for FlexAttention, which skips fully masked blocks."""
        if window not in self._block_masks:
            ends, positions, starts = self.ends, self.positions, self.starts

            def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                inside = (query >= (key if starts is None else starts[key])) & (query < ends[key])
                return inside if window is None else inside & (positions[query] - positions[key] < window)

            some, whole = self._seen_blocks(window)
            self._block_masks[window] = BlockMask.from_kv_blocks(
                *_listed(some & ~whole),
                *_listed(whole),
                BLOCK_SIZE=BLOCK,
                mask_mod=seen,
                seq_lengths=(len(ends), len(ends)),
            )
        return self._block_masks[window]

    def _seen_blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return two masks [B, B] of blocks, B = ⌈N / 128⌉: blocks with any and with only visible pairs.

        A few blocks of queries are computed at a time, since all N x N pairs can take more memory than the model. Using
        ``any`` and ``all`` also avoids sums, which would convert all pairs to int64 on a GPU.
        """
        blocks = -(-len(self.ends) // BLOCK)
        order = torch.arange(blocks * BLOCK, device=self.ends.device)
        own = order[: len(self.ends)] if self.starts is None else self.starts
        rest = len(order) - len(own)  # padding, which no token attends to
        starts, ends, positions = (F.pad(x, (0, rest)) for x in (own, self.ends, self.positions))
        some, whole = [], []
        for queries in order.split(BLOCK * max(PAIRS_AT_A_TIME // (BLOCK * len(order)), 1)):
            seen = (queries[:, None] >= starts) & (queries[:, None] < ends)
            if window is not None:
                seen &= positions[queries][:, None] - positions < window
            pairs = seen.view(-1, BLOCK, blocks, BLOCK)
            some.append(pairs.any(3).any(1))
            whole.append(pairs.all(3).all(1))
        return torch.cat(some), torch.cat(whole)

    @cached_property
    def _block_masks(self) -> dict[int | None, BlockMask]:
        return {}

    def tiles(self, past: int = 0) -> Tiles:
        """Return the tiles of the tokens, which follow ``past`` tokens of a common past."""
        if past not in self._tiles:
            self._tiles[past] = lay_tiles(self.ends, self.positions, past)
        return self._tiles[past]

    @cached_property
    def _tiles(self) -> dict[int, Tiles]:
        return {}

    @cached_property
    def levels(self) -> tuple[Level, ...] | None:
        """The branches level by level, for attention; None if there are too many levels."""
        return lay_levels(self._spans, self.ends.device)

    @cached_property
    def walk(self) -> Walk:
        """The branches level by level, for recurrent layers."""
        return lay_walk(self._spans, self.ends.device)

    @property
    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        for branch in self.branches:
            length = branch.stop - branch.start
            firsts = range(branch.start, branch.start + branch.copies * length, length)
            spans += (Span(k, k + length, k + length if branch.copies > 1 else branch.end) for k in firsts)
        return spans

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Attention calls of the branches; neighboring small subtrees share one masked call, which is faster."""
        blocks: list[Block] = []
        small: list[Branch] = []  # top branches of neighboring small subtrees

        def close() -> None:
            if small:
                blocks.append(self._dense(small))
                small.clear()

        place = 0
        for branch in self.branches:
            if branch.start < place:
                continue  # the branch is within a small subtree
            if branch.end - branch.start > DENSE_TOKENS:
                close()
                stop = branch.end if branch.copies > 1 else branch.stop
                blocks.append(Block(branch.start, stop, branch.end, branch.root, branch.copies))
                place = stop
                continue
            if small and (branch.end - small[0].start > DENSE_TOKENS or branch.root != small[0].root):
                close()
            small.append(branch)
            place = branch.end
        close()
        return tuple(blocks)

    def _dense(self, tops: Sequence[Branch]) -> Block:
        start, end, top = tops[0].start, tops[-1].end, tops[0]
        if len(tops) == 1 and top.stop == top.end:
            return Block(start, end, end, top.root)
        order = torch.arange(start, end, device=self.ends.device)
        seen = (order[:, None] >= order) & (order[:, None] < self.ends[start:end])
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
        return Block(start, end, end, top.root, bias=bias)


def _listed(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a block mask [Q, K] to FlexAttention's format: the count and indices of key blocks per query block."""
    which = blocks_QK.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_QK.sum(-1).int()[None, None], which.int()[None, None]


def common_prefix_length(rows: Sequence[Keys]) -> int:
    """Return the length of the longest token prefix that all rows share."""
    # The lexicographically first and last rows have the shortest common prefix.
    return shared_length(min(rows), max(rows))


def shared_length(one: Keys, other: Keys) -> int:
    """Return the length of the longest token prefix that two rows share."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


Path = tuple[tuple[int, int], ...]  # for each branch of a row, its first token's index in the row and in the layout


@dataclass(frozen=True)
class TreeLayout:
    """A prefix tree with the keys of its tokens, and the locations of each row's tokens in it."""

    keys: list[int]
    tree: PrefixTree
    lengths: list[int]  # length of each row
    _paths: list[Path]

    def find(self, row: int, positions: Sequence[int]) -> list[int]:
        """Return the layout indices of the given positions of a row."""
        path, found = self._paths[row], []
        last = path[-1]  # most positions are in the last branch, so try the last branch first
        for position in positions:
            first, start = last if position >= last[0] else path[bisect_right(path, position, key=itemgetter(0)) - 1]
            found.append(start + position - first)
        return found

    def places(self, row: int) -> list[int]:
        """Return the layout indices of all tokens of a row."""
        places: list[int] = []
        for (first, start), (stop, _) in pairwise((*self._paths[row], (self.lengths[row], 0))):
            places += range(start, start + stop - first)
        return places


def lay_out(rows: Sequence[Keys], device: torch.device | str = "cpu") -> TreeLayout:
    """Lay rows out as a prefix tree. Rows may come in any order; equal rows are laid out once.

    After sorting, rows with a common prefix are neighbors. Each step takes a range of rows whose first ``depth`` tokens
    are laid out already, lays out their next common tokens as a branch, and continues with the sub-ranges that differ
    in the next token. Leaves of equal length come last, side by side. A stack replaces recursion, since histories can
    be hundreds of branches deep.
    """
    counts = Counter(rows)
    unique = sorted(counts)
    shared = [0, *map(shared_length, unique, unique[1:])]  # tokens shared with the previous row
    keys: list[int] = []
    positions: list[int] = []
    branches: list[Branch] = []
    opened: list[tuple[int, int]] = []  # start and stop of the branches on the current path
    paths: dict[Keys, Path] = {}
    # An entry of the stack is (range of rows, number of tokens per row that are laid out, path, whether the rows are
    # leaves of equal length). The bottom entry has no rows and closes the last branches.
    todo: list[tuple[Sequence[int], int, Path, bool]] = [((), 0, (), False), (range(len(unique)), 0, (), False)]
    while todo:
        part, depth, path, leaves = todo.pop()
        while len(opened) > len(path):
            branches.append(Branch(*opened.pop(), len(keys), root=not opened))
        if not part:
            continue
        if leaves:
            start, stop = len(keys), len(keys) + len(unique[part[0]]) - depth
            for k in part:
                paths[unique[k]] = (*path, (depth, len(keys)))
                keys += unique[k][depth:]
                positions += range(depth, len(unique[k]))
            branches.append(Branch(start, stop, len(keys), root=not path, copies=len(part)))
            continue
        first, last = part[0], part[-1] + 1
        common = min(shared[first + 1 : last], default=len(unique[first]))
        if common > depth:
            path = (*path, (depth, len(keys)))
            opened.append((len(keys), len(keys) + common - depth))
            keys += unique[first][depth:common]
            positions += range(depth, common)
        forks: list[tuple[Sequence[int], int, Path, bool]] = []
        alone: dict[int, list[int]] = {}  # leaves by length
        cuts = [k for k in range(first + 1, last) if shared[k] == common]
        for start, stop in pairwise((first, *cuts, last)):
            row = unique[start]
            if len(row) == common:
                paths[row] = path  # the row is laid out completely
            elif stop - start > 1 or counts[row] > 1:
                forks.append((range(start, stop), common, path, False))
            else:
                alone.setdefault(len(row), []).append(start)
        todo += reversed([*forks, *((same, common, path, True) for same in alone.values())])

    branches.sort(key=attrgetter("start"))
    ends: list[int] = []
    for branch in branches:
        length = branch.stop - branch.start
        for copy in range(branch.copies):
            ends += [branch.end if branch.copies == 1 else branch.start + (copy + 1) * length] * length
    lengths = list(map(len, rows))
    tree = PrefixTree(tuple(branches), integers(ends, device), integers(positions, device), max(lengths))
    return TreeLayout(keys, tree, lengths, [paths[row] for row in rows])
