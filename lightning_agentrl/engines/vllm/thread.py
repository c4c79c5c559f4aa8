"""Thread that runs vLLM's engine, and exchanges requests and replies between its steps."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_agentrl.engines.base import Reply, SamplingRequest, Waiting
from lightning_agentrl.errors import one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Work for the thread."""

    do: Callable[[Any], None]  # called with the engine; an exception ends the thread
    fail: Callable[[Exception], None]  # called instead if the thread has ended


@dataclass(frozen=True)
class Handling:
    """The functions with which the thread operates the engine."""

    build: Callable[[], Any]  # returns the `LLMEngine`
    add: Callable[[Any, str, SamplingRequest], None]  # adds a named request to the engine
    read: Callable[[Any], Reply]  # returns the reply in a finished output
    close: Callable[[Any], None]  # closes the engine


class VLLMThread:
    """A thread that builds vLLM's engine, steps it while requests are in flight, and closes it.

    Args:
        handling: functions that operate the engine.
    """

    def __init__(self, handling: Handling) -> None:
        self._handling = handling
        self._mail: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None ends the thread
        self._lock = threading.Lock()  # guards `_ended`; once `_ended` is set, no message is read
        self._ended: Exception | None = None
        self._built: Future[None] = Future()
        self._in_flight: dict[str, Waiting] = {}
        self._numbers = itertools.count(1)  # request names; `next` is atomic
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    def wait_until_built(self) -> None:
        """Wait until the engine is built, and raise the error if building failed."""
        self._built.result()

    def call(self, do: Callable[[Any], T]) -> T:
        """Run ``do`` with the engine in the thread and return its result; no request may be in flight."""
        result: Future[T] = Future()

        def run(engine: Any) -> None:
            try:
                if self._in_flight:
                    raise RuntimeError(f"{len(self._in_flight)} replies are still being sampled")
                result.set_result(do(engine))
            except BaseException as error:  # noqa: BLE001 - raised where the call was made
                result.set_exception(error)

        self._post(Message(run, result.set_exception))
        return result.result()

    async def ask(self, request: SamplingRequest) -> Reply:
        """Sample one reply, and abort the request if the caller is canceled."""
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        name = str(next(self._numbers))

        def begin(engine: Any) -> None:
            # Set before `add`, so that the request fails with all others if the thread ends.
            self._in_flight[name] = waiting
            try:
                self._handling.add(engine, name, request)
            except Exception as error:  # noqa: BLE001 - only this request is refused
                del self._in_flight[name]
                waiting.tell(error)

        def abort(engine: Any) -> None:
            if self._in_flight.pop(name, None):
                engine.abort_request([name])

        self._post(Message(begin, waiting.tell))
        try:
            return await waiting.future
        finally:
            if waiting.future.cancelled():
                self._mail.put(Message(abort, lambda ended: None))

    def close(self) -> None:
        """End the thread after its current step; requests in flight fail with an error."""
        self._mail.put(None)
        self._thread.join()

    def _post(self, message: Message) -> None:
        with self._lock:
            if self._ended is not None:
                raise RuntimeError(str(self._ended)) from self._ended.__cause__
            self._mail.put(message)

    def _run(self) -> None:
        try:
            engine = self._handling.build()
        except BaseException as error:  # noqa: BLE001 - raised in `wait_until_built`
            self._end(RuntimeError("vLLM could not be started"))
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        reason = RuntimeError("the engine was stopped")
        try:
            while self._read_mail(engine):
                for output in engine.step() if self._in_flight else ():
                    if output.finished and output.request_id in self._in_flight:
                        reply = self._handling.read(output)  # if reading fails, the caller still waits and is notified
                        self._in_flight.pop(output.request_id).tell(reply)
        except BaseException as error:  # noqa: BLE001 - passed to every caller, which would wait forever otherwise
            reason = RuntimeError(f"vLLM failed while sampling ({type(error).__name__}: {one_line(str(error))})")
            reason.__cause__ = error
        self._end(reason)
        self._handling.close(engine)

    def _read_mail(self, engine: Any) -> bool:
        """Handle all messages; wait for a message if no request is in flight. Return False if the thread must end."""
        while True:
            try:
                message = self._mail.get(block=not self._in_flight)
            except queue.Empty:
                return True
            if message is None:
                return False
            message.do(engine)

    def _end(self, reason: Exception) -> None:
        """Fail all waiting callers, including callers whose requests are still in the queue."""
        with self._lock:
            self._ended = reason
        for waiting in self._in_flight.values():
            waiting.tell(reason)
        self._in_flight.clear()
        while not self._mail.empty():
            message = self._mail.get()
            if message is not None:
                message.fail(reason)
