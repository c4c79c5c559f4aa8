"""Seeds: every random choice of a rollout follows from the run's seed and a counter, so nothing random needs saving.

Training episodes use seeds below ``HELD_OUT_FROM``; the held-out list of validation lies above it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np

HELD_OUT_FROM = 2**30


def derive_seed(*parts: int) -> int:
    """Return a seed below 2**30 that depends on all parts: the first word of numpy's ``SeedSequence`` for them."""
    words = np.array([part & 0xFFFFFFFF for part in parts], dtype=np.uint32)  # of a list each number would be an array
    # The last step of `generate_state(1)[0]`, around which numpy changes its error state: half the time, at each reply.
    word = (int(np.random.SeedSequence(words).pool[0]) ^ 0x8B51F9DD) * 0x464A0A99 & 0xFFFFFFFF
    return (word ^ word >> 16) % HELD_OUT_FROM


@cache
def _held_out_places() -> dict[int, int]:
    return {seed: place for place, seed in enumerate(held_out_seeds())}


def held_out_place(seed: int) -> int:
    """Return the place of a seed in the list of held-out ones; any other seed as it is."""
    return _held_out_places().get(seed, seed)


@cache
def held_out_seeds() -> tuple[int, ...]:
    """Return the fixed seeds of validation episodes, as listed in ``held_out_seeds.txt`` beside this file."""
    text = files("lightning_agentrl.episodes").joinpath("held_out_seeds.txt").read_text()
    return tuple(int(line) for line in text.split())
