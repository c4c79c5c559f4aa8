"""Freed memory is kept while it is used again, and given back where a process would grow by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_agentrl.models.allocator import FreedMemory

HOLES = """
import torch
from lightning_agentrl.models.allocator import keep_freed_memory, resident_bytes, trim
if {keep}:
    assert keep_freed_memory()
before = resident_bytes()
blocks = [torch.ones(20_000) for _ in range(3000)]  # 80 kB each, from the heap in any case
full = resident_bytes()
kept = blocks[::30]
del blocks
freed = resident_bytes()
assert trim()
print(before, full, freed, resident_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_holes_are_given_back(keep: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HOLES.format(keep=keep)], capture_output=True, text=True, check=True, timeout=120
    )
    before, full, freed, after = (int(number) / 1e6 for number in ran.stdout.split())
    assert full - before > 200
    assert freed - before > 200, "what lies between blocks in use stays with the process"
    assert after - before < 60


def test_memory_is_given_back_where_more_is_held_than_usual() -> None:
    """In MB: an iteration needs 100, and each leaves 3 in holes, until they are given back."""
    held, given_back = [100.0], list[float]()

    def give_back() -> bool:
        given_back.append(held[0])
        held[0] = 20.0
        return True

    freed = FreedMemory(lambda: int(held[0]), give_back)
    for _ in range(20):
        held[0] = max(held[0] + 3, 100.0)
        freed.iteration_done()
    assert max(given_back) <= 106
    assert 5 <= len(given_back) <= 10, "not in every iteration"


def test_nothing_is_given_back_where_nothing_grows() -> None:
    given_back: list[int] = []
    freed = FreedMemory(lambda: 100 + len(given_back), lambda: bool(given_back.append(1)) or True)
    for _ in range(20):
        freed.iteration_done()
    assert not given_back
