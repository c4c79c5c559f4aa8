"""Seeds, derived from the run's seed and counters, so that a checkpoint needs no state of random generators.

Training episodes use seeds below ``HELD_OUT_FROM``; the held-out seeds of validation are at least ``HELD_OUT_FROM``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np

HELD_OUT_FROM = 2**30


def derive_seed(*parts: int) -> int:
    """Return a seed below 2**30 that depends on all parts, from the first word of numpy's ``SeedSequence(parts)``."""
    words = np.array([part & 0xFFFFFFFF for part in parts], dtype=np.uint32)  # an array is faster than a list
    # Compute the last step of `generate_state(1)[0]` without numpy's change of its error state, to save half the time.
    word = (int(np.random.SeedSequence(words).pool[0]) ^ 0x8B51F9DD) * 0x464A0A99 & 0xFFFFFFFF
    return (word ^ word >> 16) % HELD_OUT_FROM


@cache
def _held_out_places() -> dict[int, int]:
    return {seed: place for place, seed in enumerate(held_out_seeds())}


def held_out_place(seed: int) -> int:
    """Return the index of a seed in the list of held-out seeds; other seeds are returned unchanged."""
    return _held_out_places().get(seed, seed)


@cache
def held_out_seeds() -> tuple[int, ...]:
    """Return the fixed seeds of validation episodes from ``held_out_seeds.txt``."""
    text = files("lightning_agentrl.episodes").joinpath("held_out_seeds.txt").read_text()
    return tuple(int(line) for line in text.split())
