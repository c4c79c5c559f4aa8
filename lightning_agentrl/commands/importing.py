"""Import without looking for garbage meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage within, nor ever among what is there at the end: a million objects of packages, that stay.

    It would take a third of the processor's time until a command begins. Where a process has frozen its objects by
    itself, it decides what is looked through.
    """
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
