"""A request of a caller on an event loop, whose reply is sampled in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from lightning_agentrl.engines.base import Reply, SamplingRequest


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request and the future for its answer, to be made on the caller's event loop."""

    request: SamplingRequest
    future: asyncio.Future[Reply]

    @classmethod
    def for_reply(cls, request: SamplingRequest) -> Waiting:
        return cls(request, asyncio.get_running_loop().create_future())

    def tell(self, outcome: Reply | Exception) -> None:
        """Wake the caller, from any thread."""
        tell_all([(self, outcome)])


def tell_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    """Wake callers in their order, with one call for those of a loop. Works from any thread."""
    for loop, of_loop in groupby(outcomes, key=lambda one: one[0].future.get_loop()):
        with suppress(RuntimeError):  # the callers' loop is closed: nobody waits, and the worker must go on
            loop.call_soon_threadsafe(_settle_all, list(of_loop))


def _settle_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    for waiting, outcome in outcomes:
        if waiting.future.done():  # cancelled, or told that the engine has ended
            continue
        if isinstance(outcome, StopIteration):  # which no future takes
            outcome = RuntimeError(f"StopIteration: {outcome}")
        if isinstance(outcome, Exception):
            waiting.future.set_exception(outcome)
            waiting.future.exception()  # counts as read: one whose caller is ended by another's error says nothing more
        else:
            waiting.future.set_result(outcome)
