"""Time that a call really takes: not that in which other programs had the processor."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any


class HangError(BaseException):
    """A call has taken too long. No `except Exception` of an environment catches it."""


class ProcessorWait:
    """Seconds that a process has waited for a processor, as Linux counts them; 0 where it does not."""

    def __init__(self, process: int | str = "self") -> None:
        self._path = f"/proc/{process}/schedstat"
        self._file: IO[str] | None = None
        self._known = True

    def __call__(self) -> float:
        try:
            if self._file is None and self._known:
                self._file = open(self._path, encoding="ascii")  # noqa: SIM115 - kept for all calls
            if self._file is not None:
                self._file.seek(0)
                return int(self._file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            self._file, self._known = None, False
        return 0.0


_waiting = ProcessorWait()


def now() -> float:
    """Return seconds that go on unless this process waits for a processor."""
    return time.perf_counter() - _waiting()


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise a HangError in this thread after so many seconds, and every second from then on.

    `listen_to_alarms` must have been called.
    """
    _Alarm.end = now() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Alarm:
    end = 0.0


def listen_to_alarms() -> None:
    """Let the alarms of this process, which has nothing else to do, end the calls of its environments."""

    def ring(number: int, frame: Any) -> None:
        if now() >= _Alarm.end:
            raise HangError

    signal.signal(signal.SIGALRM, ring)


@dataclass
class Clock:
    """Seconds of the environment and of the checks; resets, making and calls that hang do not count for the limit."""

    limit: float
    started: float = field(default_factory=now)
    times: dict[str, list[float]] = field(default_factory=lambda: {"make": [], "reset": [], "step": []})

    def spent(self) -> float:
        """Return the seconds that count."""
        return now() - self.started - sum(sum(self.times.get(kind, ())) for kind in ("make", "reset", "hang"))

    def until(self, share: float) -> _Until:
        """Return what says whether a share of the limit is used up from now on, or all of it."""
        return _Until(self, min(self.spent() + share * self.limit, self.limit))


@dataclass(frozen=True)
class _Until:
    clock: Clock
    end: float

    def __call__(self) -> bool:
        return self.clock.spent() > self.end
