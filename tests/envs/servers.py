"""Servers on loopback: an aiohttp application in a thread, and one that answers a socket as a test says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

SCHEMA: dict[str, Any] = {
    "action": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]},
    "observation": {"properties": {"echo": {"type": "string"}, "length": {"type": "integer"}}},
    "state": {},
}
STATE = {"type": "state", "data": {"step_count": 0}}


@contextmanager
def serving(app: web.Application, port: int = 0) -> Iterator[str]:
    """Run an application; gives its address. Of port 0 it takes one that is free."""
    listening = socket.create_server(("127.0.0.1", port))
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        started.set()
        await ended.wait()
        await runner.cleanup()

    async def end() -> None:
        ended.set()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(10)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
        loop.close()


def answering(
    play: Callable[[web.WebSocketResponse], Awaitable[None]], greeting: Any = STATE, **settings: Any
) -> web.Application:
    """Return an application that greets each socket and gives it to ``play``; settings are those of the socket."""

    async def connect(request: web.Request) -> web.WebSocketResponse:
        connected = web.WebSocketResponse(**settings)
        await connected.prepare(request)
        await connected.receive()  # the question for its state, with which a client begins
        await connected.send_json(greeting)
        await play(connected)
        return connected

    app = web.Application()
    app.add_routes([web.get("/schema", giving(SCHEMA)), web.get("/ws", connect)])
    return app


def giving(content: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return what answers a request with this content, as JSON."""

    async def give(request: web.Request) -> web.Response:
        return web.json_response(content)

    return give


def observation(text: Any = "text", reward: Any = 0.0, done: Any = False, **metadata: Any) -> dict[str, Any]:
    """Return an answer of the protocol."""
    data = {"observation": {"echo": text, "length": 3, "metadata": metadata}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}
