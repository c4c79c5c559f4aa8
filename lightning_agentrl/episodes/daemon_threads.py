"""Threads for blocking calls of user-written code that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread for each call.

    A call that never returns holds up neither other calls nor the exit of the interpreter, which waits for the threads
    of an ordinary executor.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                    future.set_exception(error)

        threading.Thread(target=work, name="call", daemon=True).start()
        return future
