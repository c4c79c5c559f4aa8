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
                await part()

    with engine.seats(min(at_a_time, len(parts))) as seats:
        async with asyncio.TaskGroup() as tasks:
            for seat in seats:
                tasks.create_task(play(seat))
