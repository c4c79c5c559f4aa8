"""Random mini-batches that do not depend on how environments are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(envs: Sequence[int], num_envs: int, seed: int) -> np.ndarray:
    """Return a random place in [0, 1) for every row, the same for a row on whichever rank it lies.

    The rows of each environment are permuted and spread evenly over [0, 1), environments being shifted against each
    other at random. So any interval takes nearly the same number of rows of every environment, and exactly its share
    of all rows where that is a whole number and environments have equally many rows.

    Args:
        envs: environment of each row of this rank, numbered over all ranks, in the order of time.
        num_envs: environments over all ranks.
        seed: the same on all ranks.
    """
    shift = np.random.default_rng([seed, num_envs]).permutation(num_envs)
    places = np.empty(len(envs))
    by_env = np.argsort(envs, kind="stable")
    owners, firsts = np.unique(np.asarray(envs)[by_env], return_index=True)
    for env, rows in zip(owners.tolist(), np.split(by_env, firsts[1:]), strict=False):  # without rows, one empty part
        order = np.random.default_rng([seed, num_envs, env]).permutation(len(rows))
        places[rows] = (order + (shift[env] + 0.5) / num_envs) / len(rows)
    return places


def split(places: np.ndarray, count: int, upto: float = 1.0) -> list[list[int]]:
    """Return the rows whose place lies below ``upto``, split into ``count`` intervals of equal width."""
    part = np.floor(places / upto * count).astype(int)
    return [np.flatnonzero(part == k).tolist() for k in range(count)]
