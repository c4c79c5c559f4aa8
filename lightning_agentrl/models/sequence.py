"""Sequence parallelism (Ulysses): a group of ranks reads rows together, and each rank reads a shard of the tokens.

Every layer runs on a shard. Around attention, ranks exchange tokens for heads: each rank computes some of the heads
over all tokens, with the kernels of a single rank. The last hidden states are sent to the ranks that own their rows, so
all later steps (vocabulary projection, values, losses) are the same as without a group. Gradients of weights are
partial sums, which the strategy adds up over all ranks anyway.

Source: Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from lightning_agentrl.models.packing import Packed, pack
from lightning_agentrl.models.prefix_tree import PrefixTree
from lightning_agentrl.models.vision import FamilyReader
from lightning_agentrl.types import Row
from lightning_agentrl.types.transfer import integers


@dataclass(frozen=True)
class SequenceGroup:
    """Neighboring ranks that read their rows together.

    Args:
        handle: torch's process group.
        rank: rank of this process within the group.
        size: number of ranks, P.
    """

    handle: Any
    rank: int
    size: int


def sequence_group(size: int) -> SequenceGroup:
    """Split all ranks into groups of ``size`` neighbors and return the group of this rank. Call this on all ranks."""
    handle, _ = dist.new_subgroups(size)
    return SequenceGroup(handle, dist.get_rank(handle), size)


class Exchange(torch.autograd.Function):
    """Differentiable all-to-all along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


@dataclass(frozen=True)
class Shard:
    """This rank's S = ⌈N / P⌉ of the N tokens of a prefix tree; the last shards may end with padding.

    Args:
        group: ranks that read the tree together.
        tree: the whole tree.
        sends: [X] int64, indices of the tokens in this shard whose hidden states are sent, ordered by receiving rank.
        sent: number of hidden states sent to each rank.
        received: number of hidden states received from each shard.
    """

    group: SequenceGroup
    tree: PrefixTree
    sends: Tensor
    sent: list[int]
    received: list[int]

    @property
    def size(self) -> int:
        return shard_size(len(self.tree.ends), self.group)

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's part [..., S] of a tensor [..., N] over all tokens, padded with 0."""
        start, size = self.group.rank * self.size, self.size
        own = x[..., start : start + size]
        return F.pad(own, (0, size - own.shape[-1]))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads: from all heads of this rank's tokens to this rank's heads of all tokens.

        Args:
            query: queries [1, H, S, D].
            key: keys [1, G, S, D]; if G < P, several ranks get the same head.
            value: values [1, G, S, D].

        Returns:
            Queries [1, H / P, N, D], keys and values [1, max(G, P) / P, N, D] of all tokens.
        """
        parts = self.group.size
        if key.shape[1] < parts:
            key, value = (x.repeat_interleave(parts // x.shape[1], 1) for x in (key, value))
        heads = [x[0].unflatten(0, (parts, -1)) for x in (query, key, value)]  # [P, H / P, S, D]
        sizes = [x.shape[1] for x in heads]
        # This rank's heads of each shard.
        mine = Exchange.apply(torch.cat(heads, 1), self.group.handle, [1] * parts, [1] * parts)
        whole = mine.transpose(0, 1).flatten(1, 2)[None, :, : len(self.tree.ends)]
        return cast(tuple[Tensor, Tensor, Tensor], whole.split(sizes, 1))

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange heads for tokens: [1, N, H / P, D] to [1, S, H, D]."""
        parts = self.group.size
        padded = F.pad(out[0], (0, 0, 0, 0, 0, parts * self.size - out.shape[1]))
        mine = Exchange.apply(padded.unflatten(0, (parts, -1)), self.group.handle, [1] * parts, [1] * parts)
        return mine.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's part [H / P] of a tensor [H] over all query heads."""
        return x.chunk(self.group.size)[self.group.rank]

    def to_readers(self, hidden_SH: Tensor) -> Tensor:
        """Send hidden states [S, H] to the ranks that own their rows; return the received states, ordered by shard."""
        return Exchange.apply(hidden_SH[self.sends], self.group.handle, self.sent, self.received)


@dataclass(frozen=True, kw_only=True)
class PackedShard(Packed):
    """A shard of a packed row; logit positions index the hidden states that this rank receives."""

    shard: Shard


def shard_size(tokens: int, group: SequenceGroup) -> int:
    """Return the number of tokens that each rank of a group reads, padding included."""
    return -(-tokens // group.size)


def pack_shard(
    rows: Sequence[Row],
    owners: Sequence[int],
    group: SequenceGroup,
    device: torch.device | str = "cpu",
    reader: FamilyReader | None = None,
    feed_tower: bool = False,
) -> PackedShard:
    """Pack the rows of all ranks of a group into one row, and return this rank's shard of it.

    The shard's logit positions and targets belong to this rank's own rows, in the order of the rows. Every rank runs
    the vision tower on all images and keeps the features of tokens in its shard.

    Args:
        rows: rows of all ranks, in the same order on each rank.
        owners: rank in the group that owns each row; -1 if no rank owns the row.
        group: ranks that read the rows together.
        device: device of the returned tensors.
        reader: image reader of the model; None for a text-only model.
        feed_tower: whether to add a blank image if there are no images, so that the vision tower gets gradients.
    """
    whole = pack(rows, device, True, reader, feed_tower)
    assert whole.tree is not None
    places = whole.logit_positions.tolist()
    readers = [owner for row, owner in zip(rows, owners, strict=True) for _ in row.logit_positions]
    size = shard_size(len(whole.tree.ends), group)
    start = group.rank * size
    sends: list[list[int]] = [[] for _ in range(group.size)]
    for place, owner in zip(places, readers, strict=True):
        if start <= place < start + size and owner >= 0:
            sends[owner].append(place - start)
    own = [number for number, owner in enumerate(readers) if owner == group.rank]
    shards = integers([places[number] // size for number in own])  # shard of each of this rank's logit positions
    shard = Shard(
        group,
        whole.tree,
        integers([place for part in sends for place in part], device),
        list(map(len, sends)),
        shards.bincount(minlength=group.size).tolist(),
    )
    inside = sorted({place - start for place in places if start <= place < start + size})
    own_part = {
        "ids": shard.cut(whole.ids),
        "positions": shard.cut(whole.positions),
        # Received hidden states are ordered by shard.
        "logit_positions": shards.argsort(stable=True).argsort().to(device),
        "targets": whole.targets[integers(own, device)],
        "unique_positions": integers(inside or [0], device),  # feed-forward networks may fail on empty inputs
        "images": None if whole.images is None else whole.images.cut(start, size),
    }
    return PackedShard(**vars(whole) | own_part, shard=shard)


def head_counts(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a model's counts of attention heads by config setting; a count is a list if layers differ."""
    text = config.get_text_config()
    names = {"num_attention_heads", "num_key_value_heads", *(name for name in vars(text) if "num_" in name)}
    counted = [name for name in sorted(names) if "attention_heads" in name or "key_value_heads" in name]
    return {name: count for name in counted if (count := getattr(text, name, None))}


def shares_heads(config: PreTrainedConfig, parts: int) -> bool:
    """Return whether a model's heads can be divided equally among ``parts`` ranks; ranks may share a key/value head."""
    for name, given in head_counts(config).items():
        for count in given if isinstance(given, list) else [given]:
            if count % parts and ("value" not in name or parts % count):
                return False
    return True
