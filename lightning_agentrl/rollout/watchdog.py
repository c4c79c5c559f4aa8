"""A watchdog over collections: warns of what is waited for when no session moves, and stops nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning_agentrl.episodes.session import Session
from lightning_agentrl.stalls import reporting

NAMED = 8  # environments that a warning lists by number


class Watchdog:
    """A thread that warns when no session has moved for some time, and again each time that passes.

    A session moves when its environment or its judge is called or answers, and when it begins or ends a collection.

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
        self._changed_at = time.monotonic()

    def on_guard(self) -> AbstractContextManager[None]:
        """Watch from a separate thread, since a stuck call may hold up the event loop too."""
        self._changed_at = time.monotonic()
        return reporting(self._state, self.seconds, self.stage)

    @contextmanager
    def watching(self, session: Session) -> Iterator[None]:
        """Expect this session to move while inside."""
        self._change(self._sessions.append, session)
        try:
            yield
        finally:
            self._change(self._sessions.remove, session)

    def _change(self, change: Callable[[Session], None], session: Session) -> None:
        with self._lock:
            change(session)
            self._changed_at = time.monotonic()

    def _state(self) -> tuple[float, str]:
        with self._lock:
            sessions, moved_at = list(self._sessions), self._changed_at
        return max([moved_at, *(session.worker.moved_at for session in sessions)]), self._awaited(sessions)

    def _awaited(self, sessions: list[Session]) -> str:
        calls: dict[str, list[int]] = {}
        for session in sessions:
            calls.setdefault(session.worker.call, []).append(session.index)
        engine = calls.pop("", [])
        held = [f"{call} of {_environments(numbers)}" for call, numbers in sorted(calls.items())]
        if engine:
            held.append(f"replies of {self.engine} to {_environments(engine)}")
        return " and for ".join(held)


def _environments(numbers: list[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)[:NAMED]))
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"environment{'s' if len(numbers) > 1 else ''} {listed}{more}"
