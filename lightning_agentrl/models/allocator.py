"""Keeping freed memory in the process: with glibc's defaults every micro-batch faults in the same pages again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve large blocks from one heap that it never returns to the system.

    All threads share the heap, so an update can use what the engine's thread has freed.

    Returns:
        False without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**28}
    return all(libc.mallopt(option, value) == 1 for option, value in settings.items())
