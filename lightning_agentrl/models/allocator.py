"""Memory allocator settings: reuse freed memory between micro-batches, release it if it grows over iterations.

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
    """Configure glibc's malloc to serve large blocks from one heap that it never returns to the system.

    All threads share the heap, so an update can reuse memory that the engine's thread has freed.

    Returns:
        Whether the settings were accepted; False without glibc.
    """
    libc = _glibc()
    if libc is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**28}
    return all(libc.mallopt(option, value) == 1 for option, value in settings.items())


class FreedMemory:
    """Return freed memory to the system when the process has grown over iterations.

    Micro-batches differ in length, so the heap gets holes that the next micro-batch does not fit into, and the process
    would grow by a few percent per iteration. Returning everything after each iteration would cost page faults. The
    baseline is the memory after the first iteration, and is measured again after each release.
    """

    SLACK = 1.02

    def __init__(self, held: Callable[[], int] | None = None, give_back: Callable[[], bool] | None = None) -> None:
        self._held, self._give_back = held or resident_bytes, give_back or trim
        self._usual: int | None = None  # baseline in bytes

    def iteration_done(self) -> None:
        """Release memory if the process holds more than the baseline; call this after each iteration."""
        held = self._held()
        if self._usual is None:
            self._usual = held
        elif held > self.SLACK * self._usual and self._give_back():
            self._usual = None


def trim() -> bool:
    """Release freed memory to the system and return whether any was released; False without glibc."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes; 0 if the system does not report the size."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
