"""A watchdog over collections and their engine: says what is waited for when nothing moves. It stops nothing."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning_agentrl.episodes.session import Session

NAMED = 8  # environments that a warning lists by number


class Watchdog:
    """A thread that warns when no session has moved for some time, and again each time that passes.

    A session moves when its environment or its judge is called or answers, and when it begins or ends a collection. An
    engine that loads the weights moves when it has them.

    Args:
        seconds: that time; 0: never warn.
        engine: name of the engine.
        stage: gives the running stage.
    """

    def __init__(self, seconds: float, engine: str, stage: Callable[[], str]) -> None:
        self.seconds = seconds
        self.engine = engine
        self.stage = stage
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._awaited = ""  # what else is to move
        self._changed_at = time.monotonic()

    @contextmanager
    def on_guard(self) -> Iterator[None]:
        """Watch from a thread of its own, since a stuck call may hold up the event loop too."""
        if not self.seconds:
            yield
            return
        over = threading.Event()
        self._changed_at = time.monotonic()
        thread = threading.Thread(target=self._look, args=(over,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def watching(self, session: Session) -> Iterator[None]:
        """Expect this session to move while inside."""
        self._change(self._sessions.append, session)
        try:
            yield
        finally:
            self._change(self._sessions.remove, session)

    def taking_weights(self) -> AbstractContextManager[None]:
        """Expect the engine to load the weights while inside."""
        return self.waiting_for(f"{self.engine} to take over the weights")

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Expect to leave soon; what holds this up is named as given."""
        with self.on_guard():
            self._awaited = what
            try:
                yield
            finally:
                self._awaited = ""

    def _change(self, change: Callable[[Session], None], session: Session) -> None:
        with self._lock:
            change(session)
            self._changed_at = time.monotonic()

    def _look(self, over: threading.Event) -> None:
        warned_at = 0.0
        while True:
            with self._lock:
                sessions, moved_at = list(self._sessions), self._changed_at
            moved_at = max([moved_at, *(session.moved_at for session in sessions)])
            left = max(moved_at, warned_at) + self.seconds - time.monotonic()
            if left <= 0 and (sessions or self._awaited):
                warned_at = time.monotonic()
                warnings.warn(self._message(sessions, warned_at - moved_at), stacklevel=1)
            if over.wait(min(left if left > 0 else self.seconds, threading.TIMEOUT_MAX)):
                return

    def _message(self, sessions: list[Session], seconds: float) -> str:
        calls: dict[str, list[int]] = {}
        for session in sessions:
            calls.setdefault(session.call, []).append(session.index)
        engine = calls.pop("", [])
        held = [f"{call} of {_environments(numbers)}" for call, numbers in sorted(calls.items())]
        if self._awaited:
            held.append(self._awaited)
        if engine:
            held.append(f"replies of {self.engine} to {_environments(engine)}")
        return f"nothing has moved for {seconds:.0f} s in stage {self.stage()}; waiting for {' and for '.join(held)}"


def _environments(numbers: list[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)[:NAMED]))
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"environment{'s' if len(numbers) > 1 else ''} {listed}{more}"
