"""Shares of the tokens of a mini-batch, or of the groups of a rollout."""

from __future__ import annotations

import math


def check_share(name: str, share: float) -> None:
    """Raise a ValueError that begins with ``name`` unless the share is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ValueError(f"{name}: share must be above 0 and at most 1, got {share}")


def count_of(share: float, count: int) -> int:
    """Return ``max(1, floor(share * count))``; a product that rounding puts just below an integer counts as it."""
    return max(1, math.floor(share * count + 1e-9))
