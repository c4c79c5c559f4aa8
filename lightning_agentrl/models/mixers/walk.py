"""Scans of recurrent layers over a prefix tree, level by level: each branch starts from its parent's last state.

The branches of a level are one batch, padded on the right; a scan must keep its state on padding. A layer calls its
scan once per level; the number of levels is the largest number of branches on a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.models.attention.flash import Span
from lightning_agentrl.types.transfer import integers

Scan = Callable[[dict[str, Tensor], Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Level:
    """The B branches at one depth of the tree, with at most L tokens each."""

    places: Tensor  # [B, L] int64, layout indices of the branches' tokens; arbitrary on padding
    there: Tensor  # [B, L] bool, False on padding
    parents: Tensor | None  # [B] int64, index of each branch's parent in the level above; None at the roots


@dataclass(frozen=True)
class Walk:
    """A tree of N tokens, level by level."""

    levels: tuple[Level, ...]
    order: Tensor  # [N] int64, index of each token in the concatenation of all levels
    # [N + 1] int64, index of each token's predecessor on its path; N for tokens without a predecessor, and at index N.
    previous: Tensor

    def before(self, count: int) -> list[Tensor]:
        """Return ``count`` tensors [N]: tensor k has the index of the k-th token before each token, or N."""
        places = [torch.arange(len(self.previous), device=self.previous.device)]
        for _ in range(count - 1):
            places.append(self.previous[places[-1]])
        return [x[:-1] for x in places]

    def scan(self, inputs: Mapping[str, Tensor], scan: Scan) -> Tensor:
        """Run a scan over all branches and return its outputs [1, N, …].

        Args:
            inputs: inputs of the tokens by name, each [1, N, …].
            scan: function of the inputs of a level, each [B, L, …] with zeros on padding, and the initial states
                [B, …], None at the roots. Returns outputs [B, L, …] and final states [B, …].
        """
        outputs = list[Tensor]()
        states: Tensor | None = None
        for level in self.levels:
            parts = {name: x[0][level.places] for name, x in inputs.items()}
            filled = {name: x * _like(level.there, x) for name, x in parts.items()}
            begun = None if states is None or level.parents is None else states[level.parents]
            output, states = scan(filled, begun)
            outputs.append(output[level.there])
        return torch.cat(outputs)[self.order][None]


def _like(there_BL: Tensor, x: Tensor) -> Tensor:
    return there_BL.view(*there_BL.shape, *[1] * (x.ndim - 2))


def lay_walk(spans: Sequence[Span], device: torch.device) -> Walk:
    """Group the branches of a tree by depth.

    Args:
        spans: branches in depth-first order, each beginning where the previous branch stops.
        device: device of the returned tensors.
    """
    count = spans[-1].stop
    previous = [*range(-1, count - 1), count]
    # Branches that contain the current branch, and their indices within their levels.
    open_: list[tuple[Span, int]] = []
    levels: list[list[tuple[Span, int]]] = []  # for each level, its branches with the index of each branch's parent
    for span in spans:
        while open_ and open_[-1][0].end <= span.start:
            open_.pop()
        if len(open_) == len(levels):
            levels.append([])
        previous[span.start] = open_[-1][0].stop - 1 if open_ else count
        levels[len(open_)].append((span, open_[-1][1] if open_ else 0))
        open_.append((span, len(levels[len(open_)]) - 1))
    laid = tuple(_level(level, depth > 0, device) for depth, level in enumerate(levels))
    places = torch.cat([level.places[level.there] for level in laid])
    return Walk(laid, places.argsort(), integers(previous, device))


def _level(branches: Sequence[tuple[Span, int]], below: bool, device: torch.device) -> Level:
    starts, stops = (integers([getattr(span, end) for span, _ in branches], device) for end in ("start", "stop"))
    lengths = stops - starts
    within = torch.arange(int(lengths.max()), device=device)
    there = within < lengths[:, None]
    places = torch.where(there, starts[:, None] + within, starts[:, None])
    return Level(places, there, integers([parent for _, parent in branches], device) if below else None)
