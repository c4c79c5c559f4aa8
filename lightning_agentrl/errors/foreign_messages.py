"""Facts that torch reports only as text: out of memory, a full disk, an unsupported object in a checkpoint."""

from __future__ import annotations

import errno
import re

_NO_MEMORY = re.compile(r"can't allocate memory|CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> str:
    """Return "GPU" or "CPU" if an error means that the device ran out of memory; an empty string for other errors."""
    text = str(error)
    of_torch = type(error).__name__ == "OutOfMemoryError"  # compare by name, since importing torch takes seconds
    if of_torch or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text)):
        return "GPU" if of_torch or "CUDA" in text or "CUBLAS" in text else "CPU"
    return ""


def disk_full(error: BaseException) -> bool:
    """Return whether an error means that the disk is full; torch's archive writer has no error code for a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, RuntimeError) and "inline_container.cc" in str(error)


def not_plain(error: BaseException) -> str:
    """Return the class or function in a checkpoint that `torch.load` refuses, or an empty string."""
    found = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
    return found[1] if found else ""
