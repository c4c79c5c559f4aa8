"""Callers of an engine: one that is ended as it is told of an error leaves nothing to be said."""

from __future__ import annotations

import asyncio
import gc

from lightning_agentrl.engines.base import SamplingRequest, Waiting, tell_all
from lightning_agentrl.types import ModelInput


def test_an_error_is_not_told_for_a_caller_who_has_just_left() -> None:
    """As when the error of one player ends the others: asyncio would print theirs with a traceback, too."""
    said: list[str] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(context["message"]))
        request = SamplingRequest(ModelInput.of_ids((1, 2)), max_tokens=1, temperature=1.0, seed=0)
        waiting = Waiting(request, loop.create_future())

        async def caller() -> None:
            await waiting.future

        task = asyncio.create_task(caller())
        await asyncio.sleep(0)
        tell_all([(waiting, RuntimeError("memory ran out"))])
        loop.call_soon(task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(ask())
    gc.collect()
    assert said == []
