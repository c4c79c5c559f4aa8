"""Facts that other libraries report in prose only: memory that ran out, and objects in checkpoints."""

from __future__ import annotations

import dataclasses
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


# Checkpoints


def not_plain(error: BaseException) -> str:
    """Return what makes the object in a checkpoint that torch does not read, a class or a function; empty if none."""
    found = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
    return found[1] if found else ""


# Other processes

_LOST = re.compile(
    r"gloo.*(?:(?P<closed>Connection (?:closed|reset) by peer|Broken pipe)|[Tt]imed out|timeout|No route|unreachable)"
    r"|Application timeout caused pair closure",
    re.DOTALL,
)
_PEER = re.compile(r"\[([\d.]+|[\da-fA-F:]+:[\da-fA-F:]+)\]:\d+")


@dataclasses.dataclass(frozen=True)
class LostRank:
    """What the network says of a process that this one cannot talk to any more.

    Args:
        closed: it has closed the connection, as a process does that ends; else it is silent.
        address: of its machine, where that is told.
    """

    closed: bool
    address: str = ""


def lost_rank(error: BaseException) -> LostRank | None:
    """Return what is said of another process that is lost, by gloo; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not (found := _LOST.search(text)):
        return None
    address = _PEER.search(text)
    return LostRank(found["closed"] is not None, address[1] if address else "")


def not_met(error: BaseException) -> bool:
    """Return whether the processes of a run did not find each other at its start."""
    return type(error).__name__ in ("DistStoreError", "DistNetworkError")  # by name: torch takes seconds to import
