"""How long attention over prefix trees takes in tiles, against one call for each branch.

    python benchmarks/speed/attention.py

Both read the same trees, by turns, forward and backward; a ratio is of two neighbours. Writes
the section on attention of `docs/results/speed.md`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages import RESULTS, put
from lightning_agentrl.models.attention.flash import TILED_DEPTH, TiledAttention
from lightning_agentrl.models.attention.tree import BranchedAttention
from lightning_agentrl.models.prefix_tree import PrefixTree, lay_out

PAIRS, FIRST = 24, 4  # of which the first do not count
TEXT = """\
## Attention over prefix trees on a CPU

Milliseconds of one layer, forward and backward, in float32 with {threads} threads. *Tiles* computes all tokens in tiles
of 32 (`models/attention/flash.py`), *branches* calls the kernel once for each branch (`models/attention/tree.py`). Both
read the same trees alternately. *Times as fast* is the median of {pairs} pairs, with quartiles in brackets. A run uses
tiles for rows of up to {depth} tokens and branches for longer rows. Written by `benchmarks/speed/attention.py`.

| rows | shared tokens | row tokens | tree tokens | heads, key heads, width | branches, ms | tiles, ms | times as fast |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Shape:
    """Rows with a common beginning, in which about every seventh token after it differs from row to row."""

    rows: int
    common: int
    tail: int

    def tree(self) -> PrefixTree:
        draw = random.Random(0)
        common = range(100, 100 + self.common)
        return lay_out(
            [
                (*common, *(draw.randrange(4) if i % 7 == 0 else 10_000 + i for i in range(self.tail)))
                for _ in range(self.rows)
            ]
        ).tree


SHAPES = (
    Shape(256, 3, 14),
    Shape(64, 30, 30),
    Shape(64, 90, 40),
    Shape(64, 110, 50),
    Shape(64, 200, 60),
    Shape(64, 300, 60),
    Shape(32, 500, 100),
)
HEADS = ((4, 4, 8), (9, 3, 64))  # the laboratory's and the demo model's


def seconds(attend: Callable[[], Tensor], gradient: Tensor) -> float:
    began = time.perf_counter()
    attend().backward(gradient)
    return time.perf_counter() - began


def row(shape: Shape, heads: int, of_keys: int, width: int) -> str:
    tree = shape.tree()
    count = len(tree.ends)
    q, k, v = (torch.randn(n, count, width, requires_grad=True) for n in (heads, of_keys, of_keys))
    gradient = torch.randn(heads, count, width)
    ways = (
        lambda: BranchedAttention.apply(q, k, v, tree.blocks, width**-0.5),
        lambda: TiledAttention.apply(q, k, v, tree.tiles(), width**-0.5),
    )
    torch.testing.assert_close(ways[0](), ways[1](), rtol=1e-3, atol=1e-4)
    taken: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS + FIRST):
        for which in (0, 1) if pair % 2 else (1, 0):
            took = seconds(ways[which], gradient)
            if pair >= FIRST:
                taken[which].append(took)
    ratios = [before / now for before, now in zip(*taken, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    before, now = (1000 * median(each) for each in taken)
    sizes = f"| {shape.rows} | {shape.common} | {shape.common + shape.tail} | {count:,} | {heads}, {of_keys}, {width} "
    return sizes + f"| {before:.1f} | {now:.1f} | {median(ratios):.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    lines = []
    for shape in SHAPES:
        for heads in HEADS:
            lines.append(row(shape, *heads))
            print(lines[-1], flush=True)
    text = TEXT.format(pairs=PAIRS, depth=TILED_DEPTH, threads=torch.get_num_threads())
    put(RESULTS / "speed.md", "attention", text + "\n".join(lines))


if __name__ == "__main__":
    main()
