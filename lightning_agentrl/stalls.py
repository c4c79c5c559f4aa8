"""Warnings about waits that take too long. Each warning names the cause and does not stop the run."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch.distributed as dist

SECONDS = 300.0  # default limit of a wait before a warning
BEATS = 4  # heartbeats of a rank within the limit


class _Watched:
    """Settings of this process: the limit of its own waits in seconds, and the watch over other ranks, if any."""

    seconds = SECONDS
    ranks: _Ranks | None = None


def watch(seconds: float) -> None:
    """Set the limit after which waits and silent ranks are reported.

    All ranks must call this function.

    Args:
        seconds: limit in seconds; 0: never report.
    """
    stop_watching()
    _Watched.seconds = seconds
    if 0 < seconds < math.inf and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _Watched.ranks = _Ranks(seconds)


def stop_watching() -> None:
    """Restore the default limit for waits, and stop watching other ranks."""
    if _Watched.ranks is not None:
        _Watched.ranks.over.set()
    _Watched.seconds, _Watched.ranks = SECONDS, None


def waiting_for(what: str, stage: str | Callable[[], str] = "") -> AbstractContextManager[None]:
    """Warn each time the limit passes inside this context.

    Args:
        what: description of what is waited for.
        stage: stage of the run, for the warning.
    """
    return _waiting(lambda: what, stage)


def waiting_for_ranks() -> AbstractContextManager[None]:
    """Warn if a collective operation takes too long; one rank names the missing ranks. All ranks must enter this."""
    ranks = _Watched.ranks
    return _waiting(lambda: "the other ranks", "") if ranks is None else ranks.meeting()


def _waiting(what: Callable[[], str], stage: str | Callable[[], str]) -> AbstractContextManager[None]:
    began = time.monotonic()
    return reporting(lambda: (began, what()), _Watched.seconds, stage)


@contextmanager
def reporting(
    state: Callable[[], tuple[float, str]], seconds: float, stage: str | Callable[[], str] = ""
) -> Iterator[None]:
    """Warn from a separate thread, since the main thread or an event loop may be stuck.

    Args:
        state: function that returns the time of the last progress, on the monotonic clock, and a description of what is
            waited for, empty if there is no wait.
        seconds: seconds without progress after which to warn, repeatedly; 0: never.
        stage: stage of the run, for the warning.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_report, args=(state, seconds, stage, over), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _report(
    state: Callable[[], tuple[float, str]], seconds: float, stage: str | Callable[[], str], over: threading.Event
) -> None:
    warned_at = 0.0
    while True:
        moved_at, what = state()
        left = max(moved_at, warned_at) + seconds - time.monotonic()
        if left <= 0 and what:
            warned_at = time.monotonic()
            name = stage if isinstance(stage, str) else stage()
            place = f" in stage {name}" if name else ""
            _warn(f"nothing has moved for {warned_at - moved_at:.0f} s{place}; waiting for {what}")
        if over.wait(min(left if left > 0 else seconds, threading.TIMEOUT_MAX)):
            return


def _warn(text: str) -> None:
    rank = f"rank {_Watched.ranks.rank}: " if _Watched.ranks is not None else ""
    # Without a registry, Python shows the warning each time.
    warnings.warn_explicit(rank + text, UserWarning, __file__, 0)


class _Ranks:
    """Heartbeats that ranks exchange through the store of the process group.

    A thread of each rank publishes a heartbeat and the number of collectives that the rank has entered. A rank without
    new heartbeats is stopped or unreachable; a rank with a lower count is late. The store is on rank 0, so if that rank
    is stopped, publishing blocks.

    Args:
        seconds: seconds without a new heartbeat after which a rank is reported.
    """

    def __init__(self, seconds: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.over = threading.Event()
        self._seconds = seconds
        self._entered = 0  # number of collectives entered
        self._published = [b""] * self.world
        self._missed = [0] * self.world  # intervals without a new heartbeat
        self._store = cast(Any, dist).PrefixStore("stalls", dist.distributed_c10d._get_default_store())
        threading.Thread(target=self._exchange, name="ranks", daemon=True).start()

    def meeting(self) -> AbstractContextManager[None]:
        """Count a collective, and warn if other ranks do not enter it."""
        self._entered += 1
        number = self._entered
        return _waiting(lambda: self._late(number), "")

    def _late(self, number: int) -> str:
        """List the ranks that have not entered a collective, on the first rank that has; empty on other ranks."""
        entered = [int(text.split()[1]) if text else 0 for text in self._published]
        entered[self.rank] = number
        late = [rank for rank in range(self.world) if entered[rank] < number]
        if late:
            return _listed(late) if self.rank == _first_other(self.world, late) else ""
        return "the exchange between all ranks" if self.rank == 0 else ""

    def _exchange(self) -> None:
        keys = [str(rank) for rank in range(self.world)]
        beat = 0
        while not self.over.wait(self._seconds / BEATS):
            beat += 1
            try:
                with waiting_for("rank 0, which does not answer") if self.rank == 1 else nullcontext():
                    self._store.set(str(self.rank), f"{beat} {self._entered}")
                    found = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
            except RuntimeError:  # rank 0 has ended
                return
            before, self._published = self._published, found
            self._missed = [
                missed + 1 if new == old else 0 for missed, new, old in zip(self._missed, found, before, strict=True)
            ]
            silent = [rank for rank, missed in enumerate(self._missed) if missed >= BEATS]
            again = any(self._missed[rank] % BEATS == 0 for rank in silent)
            if again and self.rank == _first_other(self.world, silent):
                _warn(
                    f"no sign of life for {self._seconds:g} s from {_listed(silent)}; a process is stopped or cut off"
                )


def _first_other(world: int, ranks: Sequence[int]) -> int:
    return min(set(range(world)) - {*ranks})


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
