"""Event loop in a separate thread, so that training also works if the caller already runs an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from lightning_agentrl.episodes.env_worker import DaemonThreads

T = TypeVar("T")

LOOK_SECONDS = 0.2  # polling interval of a wait
LEFT_SECONDS = 1.0  # time limit for remaining tasks to end


class LoopThread:
    """Thread that runs coroutines for synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())  # for `asyncio.to_thread`, which judges use
        self._thread = threading.Thread(target=self._work, name="rollout-loop", daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        """Start a coroutine and return at once."""
        return Running(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], look: Callable[[], None] | None = None) -> T:
        """Run a coroutine and return its result; see :meth:`Running.result`."""
        return Running(coroutine, self._loop).result(look)

    def _work(self) -> None:
        """Run the loop until it is stopped. Restart the loop if a task ends it by SystemExit or KeyboardInterrupt."""
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue
            break
        if left := asyncio.all_tasks(self._loop):  # tasks that a user's code started
            for task in left:
                task.cancel()
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.wait(left, timeout=LEFT_SECONDS))

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Running(Generic[T]):
    """A coroutine that runs in a loop's thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, loop)

    def failed(self) -> bool:
        """Return whether the coroutine ended with an error or was canceled."""
        return self._future.done() and (self.cancelled or self._future.exception() is not None)

    @property
    def cancelled(self) -> bool:
        return self._future.cancelled()

    @property
    def error(self) -> BaseException | None:
        """The coroutine's error, or the first error of an exception group; None if running, succeeded or canceled."""
        error = self._future.exception() if self.failed() and not self.cancelled else None
        return None if error is None else _first(error)

    def wait(self, look: Callable[[], None] | None = None) -> None:
        """Wait until the coroutine has ended in any way; an interrupt cancels the coroutine.

        Args:
            look: function that is called several times a second; an error in this function interrupts the wait.
        """
        try:
            while wait([self._future], None if look is None else LOOK_SECONDS).not_done:
                assert look is not None
                look()
        except BaseException:
            self.cancel()
            raise

    def result(self, look: Callable[[], None] | None = None) -> T:
        """Wait for the result and return it; an interrupt cancels the coroutine and waits until it has ended.

        Args:
            look: see :meth:`wait`.

        Raises:
            Exception: error of the coroutine; for an exception group, the group's first error, with the group as the
                cause if the error has no cause.
            RuntimeError: the coroutine raised SystemExit or KeyboardInterrupt.
        """
        self.wait(look)
        try:
            return self._future.result()
        except (SystemExit, KeyboardInterrupt) as left:
            raise RuntimeError(
                f"code of an environment, interaction or judge raised {left!r}, which would end the process"
            ) from left
        except BaseExceptionGroup as group:
            error = _first(group)
            raise error from (error.__cause__ or group)

    def cancel(self) -> None:
        """Cancel the coroutine and wait for its end, including everything that it awaits. Do nothing after its end."""
        if self._future.cancel() and not self._loop.is_closed():  # the coroutine was still running
            asyncio.run_coroutine_threadsafe(_ended(self._coroutine), self._loop).result()


async def _ended(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Wait until the task that runs this coroutine has ended."""
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t.get_coro() is coroutine), return_exceptions=True)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
