"""Playing many sessions at a time, so that the engine knows who will still ask for replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_agentrl.engines import Engine

Part = Callable[[], Coroutine[Any, Any, object]]  # of what is to be played


async def play_parts(parts: Sequence[Part], at_a_time: int, engine: Engine) -> None:
    """Play parts in their order, ``at_a_time`` of them at a time; the next begins as soon as one has ended."""
    waiting = iter(parts)

    async def play(seat: AbstractContextManager) -> None:
        with seat:
            for part in waiting:  # shared between the tasks: each takes the next one
                await _uncancelled(part)

    with engine.seats(min(at_a_time, len(parts))) as seats:
        async with asyncio.TaskGroup() as tasks:
            for seat in seats:
                tasks.create_task(play(seat))


async def _uncancelled(part: Part) -> None:
    """Play a part. A cancellation that nobody asked for is an error: a group of tasks would pass over it."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await part()
    except asyncio.CancelledError as left:
        if task.cancelling():
            raise
        sentence = "code that runs while episodes are played raised CancelledError, and nobody has cancelled it"
        raise RuntimeError(sentence) from left
