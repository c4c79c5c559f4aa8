"""Facts that torch reports as text only: memory that ran out, a full disk, a foreign object in a checkpoint."""

from __future__ import annotations

import errno
import re

_NO_MEMORY = re.compile(r"can't allocate memory|CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> str:
    """Return the device whose memory ran out, GPU or CPU; empty for other errors."""
    text = str(error)
    of_torch = type(error).__name__ == "OutOfMemoryError"  # by its name, since torch takes seconds to import
    if of_torch or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text)):
        return "GPU" if of_torch or "CUDA" in text or "CUBLAS" in text else "CPU"
    return ""


def disk_full(error: BaseException) -> bool:
    """Return whether there was no space for a file. torch's archive writer says only that it could not finish."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, RuntimeError) and "inline_container.cc" in str(error)


def not_plain(error: BaseException) -> str:
    """Return what makes the object in a checkpoint that torch does not read, a class or a function; empty if none."""
    found = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
    return found[1] if found else ""
