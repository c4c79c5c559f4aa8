"""Freed memory: kept from micro-batch to micro-batch, given back from stage to stage.

With glibc's defaults every micro-batch faults in the same pages again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve large blocks from one heap that it never returns to the system.

    All threads share the heap, so an update can use what the engine's thread has freed.

    Returns:
        False without glibc.
    """
    libc = _glibc()
    if libc is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**28}
    return all(libc.mallopt(option, value) == 1 for option, value in settings.items())


class FreedMemory:
    """Memory that was freed and is still held by the process, given back between stages that need other sizes.

    What sampling, scoring and an update have freed lies in pieces that the next stage does not fit into, so the process
    would hold the sum of what they need in place of the most, and grow with every iteration. Giving it back costs the
    faults of one micro-batch.
    """

    SLACK = 1.02

    def __init__(self, held: Callable[[], int] | None = None, give_back: Callable[[], bool] | None = None) -> None:
        self._held, self._give_back = held or resident_bytes, give_back or trim
        self._least = 0  # bytes after it was given back

    def stage_done(self) -> None:
        """Give memory back if a stage has left more of it than there was after the last time."""
        if self._held() > self.SLACK * self._least and self._give_back():
            self._least = self._held()


def trim() -> bool:
    """Return freed memory to the system; False without glibc."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


def resident_bytes() -> int:
    """Return how much main memory the process holds; 0 where that is not told."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
