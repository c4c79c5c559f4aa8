"""Many parts are played at a time, and none is lost unheard."""

from __future__ import annotations

import asyncio

import pytest

from lightning_agentrl.rollout.player import play_parts
from tests.engines.plain import PlainEngine


def played(raised: BaseException | None, cancelled: bool = False) -> list[int]:
    """Numbers of the parts that were played to their end; the second one raises."""
    done: list[int] = []

    async def part(number: int) -> None:
        await asyncio.sleep(0)
        if number == 1:
            if cancelled:
                await asyncio.sleep(1000)
            if raised is not None:
                raise raised
        done.append(number)

    async def together() -> None:
        parts = [lambda number=number: part(number) for number in range(4)]
        playing = asyncio.create_task(play_parts(parts, 2, PlainEngine()))
        if cancelled:
            await asyncio.sleep(0.05)
            playing.cancel()
        await playing

    asyncio.run(together())
    return done


def test_all_are_played() -> None:
    assert sorted(played(None)) == [0, 1, 2, 3]


def test_a_player_that_code_of_others_has_cancelled_is_an_error() -> None:
    """As by a time limit on what players share; a group of tasks passes over it, and turns would be missing."""
    with pytest.raises(ExceptionGroup) as error:
        played(asyncio.CancelledError())
    assert error.group_contains(RuntimeError, match="CancelledError without being canceled")


def test_one_that_is_cancelled_is_no_error() -> None:
    with pytest.raises(asyncio.CancelledError):
        played(None, cancelled=True)
