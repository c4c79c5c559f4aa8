"""Servers that hang, lie, or answer late, half or twice: every request gets one reply, of the current weights.

The servers are small real ones over HTTP; with vLLM: ``test_vllm_server_faults.py``.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_agentrl.commands.ending import one_line_errors
from lightning_agentrl.engines import Reply
from lightning_agentrl.engines.vllm_server import pool as server_pool
from lightning_agentrl.engines.vllm_server import server as http_server
from lightning_agentrl.engines.vllm_server.pool import ServerPool, Weights
from lightning_agentrl.engines.vllm_server.server import VLLMServer, open_session
from lightning_agentrl.errors import ConfigError, EngineGoneError
from tests.engines.small_server import SAMPLE, SmallServer, asking, small_servers

PATIENCE = 0.2
FOREVER = 60.0  # more than any test takes
Test = Callable[[ServerPool, list[SmallServer]], Awaitable[None]]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "LOOK_SECONDS", 0.02)


def play(test: Test, count: int = 2, patience: float = PATIENCE, wait_seconds: float = FOREVER) -> list[str]:
    """Run a test with servers that have the first weights; return the warnings."""

    async def run() -> None:
        async with small_servers(count) as servers, pool_of(servers, patience, wait_seconds) as pool:
            await update(pool, 1)
            await until(lambda: all(replica.used for replica in pool.replicas))
            await asyncio.wait_for(test(pool, servers), FOREVER)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
    return [str(warning.message) for warning in caught]


@asynccontextmanager
async def pool_of(servers: Sequence[SmallServer], patience: float, wait_seconds: float) -> AsyncIterator[ServerPool]:
    async with open_session(patience) as session:
        ours = [VLLMServer(server.url, session, patience) for server in servers]
        pool = ServerPool(ours, {"vocab_size": 300}, 100, (), wait_seconds)
        minding = asyncio.create_task(pool.mind())
        try:
            yield pool
        finally:
            minding.cancel()
            with suppress(asyncio.CancelledError):
                await minding


async def update(pool: ServerPool, number: int) -> None:
    await pool.pause()
    await pool.update(Weights(f"run-{number}", number, Path(str(number))))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def check(replies: Sequence[Reply], number: int) -> None:
    """One of each seed, all of these weights."""
    assert [reply.ids for reply in replies] == [(seed, number) for seed in range(len(replies))]
    assert {reply.policy_version for reply in replies} == {number}


# Hanging while replies are sampled

STOPS: dict[str, Callable[[SmallServer], None]] = {
    "server": lambda server: server.running.clear(),
    "engine": lambda server: server.engine_running.clear(),
}


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_requests_of_a_server_that_hangs_go_to_another_one(
    stop: Callable[[SmallServer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        http_server, "REPLY_TIMES", FOREVER / PATIENCE
    )  # replies may be slow: the engine's silence tells
    names = []

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        first, second = servers
        names.append(first.url)
        first.when_asked = lambda: stop(first)
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(8))), 1)
        assert first.begun
        assert set(first.begun) <= set(second.begun)
        begun = len(first.begun)
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(8))), 1)
        assert len(first.begun) == begun  # it is not asked any more

    warned = play(test)
    assert sum(f"{names[0]} is not used" in line for line in warned) == 1


@pytest.mark.slow
def test_one_that_is_back_gets_the_current_weights_first_and_its_late_replies_are_thrown_away() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        first, _ = servers
        first.when_asked = first.running.clear
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(8))), 1)
        assert first.begun
        first.when_asked = lambda: None
        await update(pool, 2)
        first.running.set()  # it answers now what it was asked for before
        first.asked.clear()
        begun = len(first.begun)
        await until(lambda: pool.replicas[0].used)
        assert first.version == "run-2"
        assert "reload_weights" in first.asked
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(8))), 2)
        assert len(first.begun) > begun + 1  # more than the token that proves it

    play(test)


def test_a_reply_of_older_weights_of_the_run_is_asked_for_again() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].version = "run-0"  # an order from before the stop, which it carried out late
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(4))), 1)
        await until(lambda: pool.replicas[0].used)
        assert servers[0].version == "run-1"

    play(test)


@pytest.mark.slow
def test_one_whose_engine_answers_but_that_never_ends_a_reply_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REPLY_TIMES", 1)

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].never.add(SAMPLE)
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(4))), 1)
        await asyncio.sleep(2 * PATIENCE)
        assert not pool.replicas[0].used  # it has to sample a token first
        servers[0].never.clear()
        await until(lambda: pool.replicas[0].used)

    warned = play(test)
    assert any("has not finished a reply" in line for line in warned)


@pytest.mark.slow
def test_a_slow_server_is_kept() -> None:
    """Each reply takes longer than the patience, and the engine answers between its steps."""

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].seconds = 6.0
        check([await pool.ask(asking(0))], 1)

    assert play(test, count=1, patience=5.0) == []


# Answers that are none


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].breaks_off = True
        check([await pool.ask(asking(0))], 1)
        assert servers[0].begun + servers[1].begun == [0, 0]

    play(test)


@pytest.mark.parametrize("status", [502, 408, 429])
def test_the_page_of_a_proxy_in_any_encoding_is_no_answer_and_asked_for_again(status: int) -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        pages = [web.Response(status=status, body="Zeitüberschreitung".encode("latin-1"), content_type="text/html")]
        servers[0].answer = lambda reply: pages.pop() if pages else web.json_response(reply)
        check([await pool.ask(asking(0))], 1)
        assert servers[0].begun == [0, 0]

    play(test, count=1)


def endless(reply: Any) -> web.Response:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**16

    return web.Response(body=body())


UNUSABLE: dict[str, Callable[[Any], web.Response]] = {
    "not finite": lambda reply: web.Response(text=json.dumps(reply).replace("-1.0", "NaN")),
    "a page": lambda reply: web.Response(text="<html>", content_type="text/html"),
    "half": lambda reply: web.Response(text=json.dumps(reply)[:40]),
    "endless": endless,
    "twice": lambda reply: web.Response(text=json.dumps(reply) * 2),
    "nested": lambda reply: web.Response(text="[" * 100_000),
    "long": lambda reply: web.Response(text="1" * 5000),
    "two": lambda reply: web.json_response({"choices": reply["choices"] * 2}),
    "text": lambda reply: web.json_response({"choices": "none"}),
    "empty": lambda reply: web.Response(status=204),
}


@pytest.mark.parametrize("answer", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_answers_move_requests_to_the_other_server(
    answer: Callable[[Any], web.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_BYTES", 2**20)
    names = []

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        names.append(servers[0].url)
        servers[0].answer = lambda reply: web.json_response(reply) if len(servers[0].begun) == 1 else answer(reply)
        check(await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(8))), 1)
        assert len(servers[0].begun) > 1
        await until(lambda: len(servers[0].begun) > 8)  # it is tried again, and not used
        assert not pool.replicas[0].used

    warned = play(test)
    assert sum(f"{names[0]} is not used" in line for line in warned) == 1


def test_server_errors_move_a_request_to_the_other_server() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].answer = lambda reply: web.Response(status=500)
        check([await pool.ask(asking(0))], 1)

    play(test)


@pytest.mark.parametrize("path", ["/version", "weights_checksum"])
def test_unusable_answers_during_an_update_drop_the_server(path: str) -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].wrong[path] = {"results": [7]}
        await update(pool, 2)
        check([await pool.ask(asking(0))], 2)
        servers[0].wrong.clear()
        await until(lambda: pool.replicas[0].used)

    play(test)


@pytest.mark.parametrize("path", [SAMPLE, "/version"])
def test_only_unusable_answers_end_the_run_like_hung_servers(path: str) -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].wrong[path] = [1, 2]
        await update(pool, 2)
        with pytest.raises(EngineGoneError, match=servers[0].url):
            await pool.ask(asking(0))

    play(test, count=1, wait_seconds=0.2)


def test_long_replies_that_always_fail_end_the_run_with_a_checkpoint() -> None:
    """The server samples single tokens, so it is used again after each failure."""

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].answer = lambda reply: (
            web.json_response(reply) if len(reply["choices"][0]["token_ids"]) == 1 else web.Response(text="{")
        )
        with pytest.raises(EngineGoneError, match=servers[0].url):
            await pool.ask(asking(0))

    play(test, count=1)


def test_a_refused_request_is_an_error_of_the_run() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].answer = lambda reply: web.json_response({"error": "the prompt is too long"}, status=400)
        with pytest.raises(ConfigError, match="the prompt is too long"):
            await pool.ask(asking(0))

    play(test)


# The only server


def test_the_only_server_is_waited_for() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].engine_running.clear()
        asked = asyncio.create_task(pool.ask(asking(0)))
        await until(lambda: not pool.replicas[0].used)
        servers[0].engine_running.set()
        check([await asked], 1)

    warned = play(test, count=1)
    assert sum("no vLLM server is left" in line and "wait_seconds" in line for line in warned) == 1


@pytest.mark.slow
def test_the_wait_has_an_end_that_names_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    urls = []

    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        urls.append(servers[0].url)
        servers[0].running.clear()
        await asyncio.gather(*(pool.ask(asking(seed)) for seed in range(3)))

    with pytest.raises(SystemExit) as ended, one_line_errors([]):
        play(test, count=1, wait_seconds=0.2)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert urls[0] in line
    assert "data.init_args.engine.init_args.wait_seconds" in line
    assert isinstance(ended.value.__context__, EngineGoneError)


# Weights


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/version", "/collective_rpc", "reload_weights", "weights_checksum"])
def test_an_update_does_not_wait_for_a_server_that_hangs_for_longer_than_its_deadline(path: str) -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].never.add(path)
        await update(pool, 2)
        assert not pool.replicas[0].used
        await update(pool, 3)
        check([await pool.ask(asking(0))], 3)
        servers[0].never.clear()
        await until(lambda: pool.replicas[0].used)
        assert servers[0].weights == "3"

    play(test)


def test_a_server_that_was_dropped_costs_later_updates_nothing() -> None:
    async def test(pool: ServerPool, servers: list[SmallServer]) -> None:
        servers[0].running.clear()
        await until(lambda: not pool.replicas[0].used)
        pool.replicas[0].server.patience = 2 * FOREVER
        for number in range(2, 5):
            await update(pool, number)

    play(test)
