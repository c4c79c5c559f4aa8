"""Ranks that hold one engine make the same steps, each hands out its own replies, and an error of one ends all.

The engine here says one token of each reply in each step; tests of tensor parallelism have vLLM itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from lightning_agentrl.engines import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.group import check_split, check_world
from lightning_agentrl.engines.vllm.lockstep import PAUSE, LockstepThread, News
from lightning_agentrl.engines.vllm.thread import Handling, VLLMThread
from tests.inputs import text

T = TypeVar("T")


class Counter:
    """Counts up from the seed of each request."""

    def __init__(self) -> None:
        self.said: dict[str, list[int]] = {}
        self.requests: dict[str, SamplingRequest] = {}
        self.steps: list[list[tuple[str, int]]] = []  # who said how much before each step
        self.fails: BaseException | None = None
        self.strays = False

    def add(self, name: str, request: SamplingRequest) -> None:
        if request.prompt == text(0):
            raise ValueError("a prompt of zeros")
        self.said[name], self.requests[name] = [], request

    def step(self) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        self.steps.append([(name, len(ids)) for name, ids in self.said.items()])
        finished = []
        for name, ids in list(self.said.items()):
            ids.append(self.requests[name].seed + len(ids) + self.strays)
            if len(ids) == self.requests[name].max_tokens:
                finished.append(SimpleNamespace(request_id=name, finished=True, ids=tuple(ids)))
                del self.said[name]
        return finished

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            del self.said[name]


class Rank:
    """One rank: its engine, its thread and what it exchanged."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank, self.engine, self.exchanges = rank, Counter(), 0
        self._slots, self._barrier = slots, barrier
        handling = Handling(
            build=lambda: self.engine,
            add=lambda engine, name, request: engine.add(name, request),
            read=lambda output: Reply(output.ids, (0.0,) * len(output.ids), False, 0),
            close=lambda _: None,
        )
        self.thread = LockstepThread(handling, tuple(range(len(slots))), rank, self._exchange)

    def _exchange(self, state: int, news: News | None) -> list[tuple[int, News | None]]:
        self.exchanges += 1
        self._slots[self.rank] = (state, news)
        self._barrier.wait()
        everything = list(self._slots)
        self._barrier.wait()
        return everything

    async def reply(self, seed: int, tokens: int = 3) -> tuple[int, ...]:
        return (await self.thread.ask(SamplingRequest(text(1, 2), tokens, 1.0, seed))).ids


def on_ranks(work: Callable[[Rank], T], count: int = 2) -> tuple[list[Rank], list[T]]:
    """What ``work`` gives on each rank, or raises there; all threads are ended."""
    slots: list[Any] = [None] * count
    barrier = Barrier(count, timeout=60)
    ranks = [Rank(rank, slots, barrier) for rank in range(count)]

    def outcome(rank: Rank) -> Any:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(outcome, ranks))
        list(pool.map(lambda rank: rank.thread.close(), ranks))
    return ranks, outcomes


def test_every_rank_makes_the_steps_of_all_and_hands_out_its_own_replies() -> None:
    """One plays three episodes of five turns, one a single turn, one nothing, in two collections."""

    async def play(rank: Rank, seed: int, turns: int) -> list[tuple[int, ...]]:
        return [await rank.reply(seed + turn, tokens=2 + turn) for turn in range(turns)]

    async def episodes(rank: Rank) -> list[list[tuple[int, ...]]]:
        turns, count = ((5, 3), (1, 1), (0, 0))[rank.rank]
        return await asyncio.gather(*(play(rank, 100 * rank.rank + 10 * i, turns) for i in range(count)))

    def work(rank: Rank) -> list[Any]:
        replies = []
        for _ in range(2):
            with rank.thread.collecting():
                replies.append(asyncio.run(episodes(rank)))
        return replies

    ranks, replies = on_ranks(work, 3)
    own = [[tuple(range(10 * i + t, 10 * i + 2 * t + 2)) for t in range(5)] for i in range(3)]
    assert replies == [[own] * 2, [[[(100, 101)]]] * 2, [[]] * 2]
    assert ranks[0].engine.steps == ranks[1].engine.steps == ranks[2].engine.steps
    assert len(ranks[0].engine.steps) < 3 * 20 * 2  # together, not one after the other
    assert any({name[0] for name, _ in step} == {"0", "1"} for step in ranks[0].engine.steps)


def test_a_request_that_is_taken_back_is_so_on_all_ranks() -> None:
    def work(rank: Rank) -> None:
        async def give_up() -> None:
            late = asyncio.create_task(rank.reply(7, tokens=10**9))
            await rank.reply(1, tokens=1)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)

        with rank.thread.collecting():
            asyncio.run(give_up() if rank.rank == 1 else asyncio.sleep(0))

    ranks, found = on_ranks(work)
    assert found == [None, None]
    assert [rank.engine.said for rank in ranks] == [{}, {}]


def test_a_request_that_the_engine_refuses_is_told_to_its_own_rank() -> None:
    def work(rank: Rank) -> tuple[int, ...]:
        with rank.thread.collecting():
            if rank.rank == 1:
                with pytest.raises(ValueError, match="of zeros"):
                    asyncio.run(rank.thread.ask(SamplingRequest(text(0), 3, 1.0, 0)))
            return asyncio.run(rank.reply(5))

    assert on_ranks(work)[1] == [(5, 6, 7)] * 2


def test_nothing_turns_fast_while_all_wait_for_environments() -> None:
    def work(rank: Rank) -> float:
        started = time.monotonic()
        with rank.thread.collecting():
            time.sleep(40 * PAUSE)
        return time.monotonic() - started

    ranks, seconds = on_ranks(work)
    for rank in ranks:
        assert 0 < rank.exchanges <= max(seconds) / PAUSE + 5
        assert rank.engine.steps == []


@pytest.mark.parametrize("waits_for", ["reply", "end"])
def test_an_error_on_one_rank_reaches_the_others(waits_for: str) -> None:
    """One that waits for a reply, and one that has all it wants."""

    def work(rank: Rank) -> None:
        with rank.thread.collecting():
            if rank.rank == 1:
                time.sleep(5 * PAUSE)
                raise KeyError("a bug of the environment")
            if waits_for == "reply":
                asyncio.run(rank.reply(1, tokens=10**9))

    ranks, (first, second) = on_ranks(work)
    assert isinstance(second, KeyError)
    assert isinstance(first, RuntimeError)
    assert str(first) == (
        "rank 1, which holds a part of vLLM's weights, has stopped (KeyError: 'a bug of the environment')"
    )
    for rank in ranks:  # nobody can go on with it
        with pytest.raises(RuntimeError, match="a bug of the environment"):
            rank.thread.call(lambda engine: None)


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit("a bug")])
def test_an_engine_that_fails_is_told_to_its_callers(error: BaseException) -> None:
    """On all ranks alike; of one that fails alone, the processes end."""

    def work(rank: Rank) -> None:
        rank.engine.fails = error
        with rank.thread.collecting():
            asyncio.run(asyncio.wait_for(rank.reply(1), timeout=60))

    for outcome in on_ranks(work)[1]:
        assert str(outcome) == f"vLLM failed while sampling ({type(error).__name__}: a bug)"


def test_what_ends_a_call_between_two_collections_is_raised_where_it_was_made() -> None:
    def leave(engine: Any) -> None:
        raise SystemExit("a bug")

    def work(rank: Rank) -> int:
        with pytest.raises(SystemExit, match="a bug"):
            rank.thread.call(leave)
        return rank.thread.call(lambda engine: 5)

    assert on_ranks(work)[1] == [5, 5]


def test_ranks_that_sampled_different_tokens_stop() -> None:
    def work(rank: Rank) -> None:
        async def play() -> None:
            await asyncio.gather(rank.reply(1, tokens=10**9), rank.reply(2, tokens=2))

        with rank.thread.collecting():
            if rank.rank == 1:  # as if rounding had led it elsewhere
                rank.engine.strays = True
            asyncio.run(play())

    for error in on_ranks(work)[1]:
        assert str(error) == "the ranks 0 to 1 of one vLLM engine have sampled different tokens"


def test_a_rank_that_is_stopped_does_not_leave_the_others_waiting() -> None:
    def work(rank: Rank) -> None:
        with rank.thread.collecting():
            if rank.rank == 0:
                asyncio.run(rank.reply(1, tokens=10**9))
            rank.thread.close()

    _, (first, second) = on_ranks(work)
    assert "rank 1" in str(first)
    assert "the engine was stopped" in str(first)
    assert str(second) == "the engine was stopped"


def test_ranks_that_are_gone_are_told() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 0:
            with rank.thread.collecting():
                asyncio.run(rank.reply(1))
        else:
            time.sleep(5 * PAUSE)
            rank._barrier.abort()  # BrokenBarrierError is a RuntimeError, as are those of torch.distributed

    assert str(on_ranks(work)[1][0]).startswith("the ranks that share vLLM's weights cannot be reached (")


def test_what_is_done_between_collections_is_refused_within_one_and_the_other_way_round() -> None:
    def work(rank: Rank) -> None:
        with pytest.raises(RuntimeError, match=r"inside collecting\(\) only"):
            asyncio.run(rank.reply(1))
        with rank.thread.collecting(), pytest.raises(RuntimeError, match="still being sampled"):
            rank.thread.call(lambda engine: None)
        rank.thread.call(lambda engine: None)

    assert on_ranks(work)[1] == [None, None]


# What is refused at the start


def test_processes_that_cannot_be_cut_into_groups_are_refused() -> None:
    check_world(1)
    with pytest.raises(ValueError, match=r"init_args\.tensor_parallel.*2.*2.*1"):
        check_world(2)


@pytest.mark.parametrize(
    ("size", "heads", "shared", "width", "fits"),
    [
        (2, 4, 2, 64, True),
        (4, 4, 2, 64, True),  # each head of keys and values is kept twice
        (3, 9, 3, 1536, True),
        (2, 9, 3, 1536, False),
        (3, 12, 2, 66, False),
        (4, 8, 8, 66, False),
        (2, 4, None, None, True),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    size: int, heads: int, shared: int | None, width: int | None, fits: bool
) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=shared, intermediate_size=width)
    if fits:
        check_split(size, config)
    else:
        with pytest.raises(ValueError, match=rf"tensor_parallel.*{size}.*{heads}"):
            check_split(size, config)


def test_whoever_waits_for_a_reply_that_cannot_be_read_is_told() -> None:
    def read(output: Any) -> Reply:
        raise KeyError("logprobs")

    thread = VLLMThread(Handling(build=Counter, add=Counter.add, read=read, close=lambda _: None))
    asked = asyncio.wait_for(thread.ask(SamplingRequest(text(1, 2), 3, 1.0, 0)), timeout=60)
    with pytest.raises(RuntimeError, match="vLLM failed while sampling"):
        asyncio.run(asked)
    thread.close()


def test_whoever_asks_an_engine_that_leaves_is_told() -> None:
    def add(engine: Counter, name: str, request: SamplingRequest) -> None:
        raise SystemExit(3)

    thread = VLLMThread(Handling(build=Counter, add=add, read=lambda output: output, close=lambda _: None))
    asked = asyncio.wait_for(thread.ask(SamplingRequest(text(1, 2), 3, 1.0, 0)), timeout=60)
    with pytest.raises(RuntimeError, match="vLLM failed while sampling"):
        asyncio.run(asked)
    thread.close()
