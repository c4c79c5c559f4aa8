"""The event loop of a run lives as long as the run, whatever the code raises that it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lightning_agentrl.rollout.event_loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_whatever_one_of_several_raises_ends_all_and_is_told(loop: LoopThread, raised: BaseException) -> None:
    """``sys.exit`` in a parser ended the loop once, and with it all news of who was waited for."""
    left: list[str] = []

    async def leaves() -> None:
        await asyncio.sleep(0.01)
        raise raised

    async def waits() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            left.append("told")

    async def together() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits())
            group.create_task(leaves())
        return "done"

    async def answer() -> int:
        return 7

    with pytest.raises(RuntimeError, match=type(raised).__name__):
        loop.run(together())
    assert left == ["told"]
    assert loop.run(answer()) == 7


def test_a_task_that_somebody_has_begun_beside_holds_no_end_up(
    loop: LoopThread, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a judge may that keeps a connection alive."""
    beside: list[asyncio.Task[None]] = []

    async def works() -> None:
        beside.append(asyncio.create_task(asyncio.sleep(1000)))
        await asyncio.sleep(1000)

    def look() -> None:
        if beside:
            raise ValueError("asked to end")

    with pytest.raises(ValueError, match="asked to end"):
        loop.run(works(), look)
    loop.stop()
    assert beside[0].cancelled()
    assert "pending" not in capsys.readouterr().err
