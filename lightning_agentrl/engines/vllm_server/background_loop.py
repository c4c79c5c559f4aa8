"""Background threads: an event loop that other loops and plain code wait for, and plain code that a loop waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread of its own, which runs coroutines until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels at its end what is left
            runner.run(self._over.wait())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; any thread can wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result in plain code; an interrupt cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what is running, and end the thread."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start plain code that may wait for ever, in a thread that does not keep the process alive."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
