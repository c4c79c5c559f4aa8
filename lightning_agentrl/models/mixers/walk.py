"""The walk of a state through a prefix tree: all branches of equal depth at a time, each from its parent's last state.

Branches of a level stand side by side and are filled up behind; a scan must leave its state as it is there. A layer
calls its scan as often as there are branches on the longest path.
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
    """The B branches of one depth, of at most L tokens."""

    places: Tensor  # [B, L] int64, of their tokens in the layout; any place where there is none
    there: Tensor  # [B, L] bool
    parents: Tensor | None  # [B] int64, which branch of the level above each goes on from; None at the roots


@dataclass(frozen=True)
class Walk:
    """A tree of N tokens, level by level."""

    levels: tuple[Level, ...]
    order: Tensor  # [N] int64, where each token stands among those of all levels, one level after the other
    previous: Tensor  # [N + 1] int64, place of the token before each on its path; N where there is none, and at N

    def before(self, count: int) -> list[Tensor]:
        """Return ``count`` tensors [N]: the places of the tokens 0, 1, … before each on its path; N for none."""
        places = [torch.arange(len(self.previous), device=self.previous.device)]
        for _ in range(count - 1):
            places.append(self.previous[places[-1]])
        return [x[:-1] for x in places]

    def scan(self, inputs: Mapping[str, Tensor], scan: Scan) -> Tensor:
        """Return what a scan gives for every token, [1, N, …].

        Args:
            inputs: of the tokens by name, [1, N, …].
            scan: takes some of them [B, L, …], 0 where a branch is filled up, and the states [B, …] that its branches
                begin with, None at the roots; returns outputs [B, L, …] and the states in which the branches end.
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
    """Return the walk through the branches of a tree.

    Args:
        spans: branches in depth-first order, each beginning where the last one stops.
        device: of the tensors.
    """
    count = spans[-1].stop
    previous = [*range(-1, count - 1), count]
    open_: list[tuple[Span, int]] = []  # the branches that a branch lies in, and their numbers within their levels
    levels: list[list[tuple[Span, int]]] = []  # of a branch: itself, and the number of its parent
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
