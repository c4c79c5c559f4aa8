"""vLLM's thread tells all who wait, whatever ends it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_agentrl.engines import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.thread import Handling, VLLMThread
from tests.inputs import text


class Counter:
    """Counts up from the seed of each request, one number in each step."""

    def __init__(self) -> None:
        self.said: dict[str, list[int]] = {}
        self.requests: dict[str, SamplingRequest] = {}
        self.fails: BaseException | None = None

    def add(self, name: str, request: SamplingRequest) -> None:
        if request.prompt == text(0):
            raise ValueError("a prompt of zeros")
        self.said[name], self.requests[name] = [], request

    def step(self) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        finished = []
        for name, ids in list(self.said.items()):
            ids.append(self.requests[name].seed + len(ids))
            if len(ids) == self.requests[name].max_tokens:
                finished.append(SimpleNamespace(request_id=name, finished=True, ids=tuple(ids)))
                del self.said[name]
        return finished


def read(output: Any) -> Reply:
    return Reply(output.ids, (0.0,) * len(output.ids), closed=False, policy_version=0)


def thread_of(engine: Counter, **functions: Any) -> VLLMThread:
    handling = {"build": lambda: engine, "add": Counter.add, "read": read, "close": lambda _: None}
    return VLLMThread(Handling(**(handling | functions)))


def ask(thread: VLLMThread, *requests: SamplingRequest) -> list[Any]:
    async def all_of() -> list[Any]:
        asked = asyncio.gather(*map(thread.ask, requests), return_exceptions=True)
        return await asyncio.wait_for(asked, timeout=60)

    return asyncio.run(all_of())


def asking(seed: int, *ids: int) -> SamplingRequest:
    return SamplingRequest(text(*(ids or (1, 2))), 3, 1.0, seed)


def test_each_request_gets_its_reply_and_a_refused_one_its_error() -> None:
    thread = thread_of(Counter())
    first, refused, second = ask(thread, asking(5), asking(0, 0), asking(7))
    assert (first.ids, second.ids) == ((5, 6, 7), (7, 8, 9))
    assert str(refused) == "a prompt of zeros"
    thread.close()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit("a bug")])
def test_an_engine_that_fails_is_told_to_its_callers(error: BaseException) -> None:
    engine = Counter()
    engine.fails = error
    thread = thread_of(engine)
    outcomes = ask(thread, asking(1), asking(2))
    assert {str(outcome) for outcome in outcomes} == {f"vLLM failed while sampling ({type(error).__name__}: a bug)"}
    thread.close()


def test_what_ends_a_call_is_raised_where_it_was_made() -> None:
    def leave(engine: Any) -> None:
        raise SystemExit("a bug")

    thread = thread_of(Counter())
    with pytest.raises(SystemExit, match="a bug"):
        thread.call(leave)
    assert thread.call(lambda engine: 5) == 5
    thread.close()


def test_whoever_waits_for_a_reply_that_cannot_be_read_is_told() -> None:
    def unreadable(output: Any) -> Reply:
        raise KeyError("logprobs")

    thread = thread_of(Counter(), read=unreadable)
    assert "vLLM failed while sampling" in str(ask(thread, asking(0))[0])
    thread.close()


def test_whoever_asks_an_engine_that_leaves_is_told() -> None:
    def add(engine: Counter, name: str, request: SamplingRequest) -> None:
        raise SystemExit(3)

    thread = thread_of(Counter(), add=add)
    assert "vLLM failed while sampling" in str(ask(thread, asking(0))[0])
    thread.close()
