"""A request of a caller on an event loop, whose reply is sampled in another thread."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from lightning_agentrl.engines.base import Reply, SamplingRequest


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request and the future for its answer, to be made on the caller's event loop."""

    request: SamplingRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Reply]

    @classmethod
    def for_reply(cls, request: SamplingRequest) -> Waiting:
        loop = asyncio.get_running_loop()
        return cls(request, loop, loop.create_future())

    def tell(self, outcome: Reply | Exception) -> None:
        """Wake the caller, from any thread."""
        with suppress(RuntimeError):  # the caller's loop is closed: nobody waits, and the worker must go on
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Reply | Exception) -> None:
        if self.future.cancelled():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
