"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
