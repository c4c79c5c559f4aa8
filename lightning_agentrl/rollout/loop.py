"""One event loop in its own thread for the whole fit, so that everything also works where a loop already runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for the result; an interrupt cancels the coroutine and waits until it has ended.

        Raises:
            Exception: what the coroutine raised; of a group, its first error, whose cause is its own or else the group.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            error = _first(group)
            raise error from (error.__cause__ or group)
        except BaseException:
            if future.cancel():  # was still running
                asyncio.run_coroutine_threadsafe(_others_ended(), self._loop).result()
            raise

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _others_ended() -> None:
    """Wait until every other task of this loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
