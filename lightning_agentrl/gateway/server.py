"""HTTP server that agents call instead of a provider: the server queues the agents' calls and sends the replies.

A training run has one server per process, on a port of 127.0.0.1 that the system chooses, in a thread with a separate
event loop. The path of a call contains the token of its episode, so an agent can reach only its own episode. The
server executes no code of agents.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from lightning_agentrl.gateway.conversation import ChatMessage, Pending, Refusal, Reply, Reward
from lightning_agentrl.gateway.wire import OF_THE_RUN, PROTOCOLS, Protocol, unknown_fields

MOST_BYTES = 32 * 2**20  # largest size of a request's body
WAITING_SECONDS = 1.0  # time between two keep-alive writes, so that clients do not time out
_LOOPBACK = ("127.0.0.1", "localhost")


class Line:
    """Queue of an agent's calls and rewards for its episode, in order of arrival.

    Args:
        gateway: server that receives the calls.
        parallel: whether several calls may wait at once.
        most: largest number of calls that are stored, for retries and for calls that continue a response; None means no
            limit.
    """

    def __init__(self, gateway: Gateway, parallel: bool = True, most: int | None = None) -> None:
        self.token = secrets.token_urlsafe(24)
        self.events: queue.Queue[Pending | Reward] = queue.Queue()
        self.parallel = parallel
        self.closed = False
        self.refused = ""  # reason of the last refusal
        self.calls: deque[Pending] = deque(maxlen=most)
        self._gateway = gateway

    @property
    def url(self) -> str:
        """Base URL for Anthropic's clients; OpenAI's clients need ``/v1`` appended."""
        return f"http://127.0.0.1:{self._gateway.port}/{self.token}"

    def answer(self, pending: Pending, reply: Reply | Refusal) -> None:
        """Send the reply to the client that waits for a call. Can be called from any thread."""

        def deliver() -> None:
            pending.reply = reply
            pending.answered.set()

        self._gateway.loop.call_soon_threadsafe(deliver)

    def close(self) -> None:
        """Close the line: refuse waiting and later calls, since the episode is over."""
        self.closed = True
        for pending in self.calls:
            if pending.reply is None:
                self.answer(pending, Refusal("the episode is over", 410))
        self._gateway.lines.pop(self.token, None)

    @property
    def abandoned(self) -> int:
        """Number of calls whose reply no client received."""
        return sum(isinstance(one.reply, Reply) and not one.delivered for one in self.calls)

    def repeated(self, digest: bytes, again: bool) -> Pending | None:
        """Return the earlier call that a request repeats, or None.

        Args:
            digest: digest of the request's path and body.
            again: whether the client marks the request as a retry. Without this mark, an equal request is a retry if no
                client waits for the earlier request any more.
        """
        for pending in reversed(self.calls):
            if pending.request == digest:
                left = not pending.delivered and not pending.waiting
                return pending if again or (left and pending.reply is None) else None
        return None


class Gateway:
    """Server with one queue of calls (:class:`Line`) per episode, or with a single queue and no tokens in paths.

    Args:
        listening: socket on which the server listens; None: a port of 127.0.0.1 that the system chooses.
        most: number of calls that a single line stores; None for one line per episode.
        secret: API key that clients of a single line must send; empty: no key is needed.
    """

    def __init__(self, listening: socket.socket | None = None, most: int | None = None, secret: str = "") -> None:
        self.lines: dict[str, Line] = {}
        self.only = None if most is None else Line(self, most=most)
        self._secret = secret
        self._listening = listening or socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.told: set[str] = set()  # fields that were already reported
        self.notes: queue.Queue[str] = queue.Queue()  # warnings for the run
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        threading.Thread(target=self._serve, args=(started,), name="gateway", daemon=True).start()
        started.wait()

    def open(self, parallel: bool = True) -> Line:
        """Open a line for one episode."""
        line = Line(self, parallel)
        self.lines[line.token] = line
        return line

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        started.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        base = "" if self.only is not None else "/{token}"
        for path in PROTOCOLS:
            app.router.add_post(f"{base}/v1/{path}", self._call)
        for path in ("reward", "v1/reward"):
            app.router.add_post(f"{base}/{path}", self._reward)
        app.router.add_get(f"{base}/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)  # an access log would contain the tokens of episodes
        await runner.setup()
        await web.SockSite(runner, self._listening).start()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests for other hosts or from web pages, and answer all refusals in the same format."""
        try:
            host = urlsplit(f"//{request.host}").hostname
            if (host not in _LOOPBACK and not self._secret) or "Origin" in request.headers:
                raise Refusal("only programs on this machine are served", 403)
            return await handler(request)
        except Refusal as refusal:
            if (line := self.lines.get(request.match_info.get("token", ""))) is not None:
                line.refused = str(refusal)
            return _refused(refusal)
        except web.HTTPRequestEntityTooLarge:
            return _refused(Refusal(f"the body has more than {MOST_BYTES} bytes", 413))
        except web.HTTPException as error:
            return _refused(Refusal(error.reason, error.status))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return _refused(Refusal(f"the body is not valid for this path: {type(error).__name__} {error}"))

    def _line(self, request: web.Request) -> Line:
        if self.only is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key")
            if self._secret and not secrets.compare_digest((given or "").encode(), self._secret.encode()):
                raise Refusal("the API key is not the token of this server", 401)
            return self.only
        line = self.lines.get(request.match_info["token"])
        if line is None or line.closed:
            raise Refusal("the episode is over", 410)
        return line

    async def _models(self, request: web.Request) -> web.Response:
        self._line(request)
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "agentrl"}]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        line = self._line(request)
        body = await _json(request)
        line.events.put(Reward(float(body["reward"]), str(body.get("id") or "")))
        return web.json_response({})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        line, path = self._line(request), request.path.partition("/v1/")[2]
        digest = hashlib.blake2b(path.encode() + await request.read(), digest_size=16).digest()
        body = await _json(request)
        protocol, again = PROTOCOLS[path], request.headers.get("x-stainless-retry-count", "0") != "0"
        pending = line.repeated(digest, again)
        if pending is None:
            if not line.parallel and any(one.reply is None for one in line.calls):
                raise Refusal("another call waits for its reply, and the agent's `parallel` is false")
            call = protocol.read(body, _before(line, body))
            self._tell(body)
            pending = Pending(f"call_{secrets.token_hex(8)}", call, digest, bool(body.get("instructions")))
            line.calls.append(pending)
            line.events.put(pending)
        pending.waiting += 1
        try:
            return await _answered(request, protocol, pending, bool(body.get("stream")))
        finally:
            pending.waiting -= 1

    def _tell(self, body: Mapping[str, Any]) -> None:
        """Report each field of a request that has no effect, once per field."""
        own = [f"{name}={body[name]}" for name in OF_THE_RUN if body.get(name) is not None and name not in self.told]
        self.told.update(name for name in OF_THE_RUN if body.get(name) is not None)
        new = [name for name in unknown_fields(body) if name not in self.told]
        self.told.update(new)
        if own:
            self.notes.put(f"an agent requests {', '.join(own)}, which has no effect: the run's settings apply")
        if new:
            self.notes.put(f"an agent sends {', '.join(new)}, which is not supported and has no effect")


@cache
def gateway() -> Gateway:
    """Return the server of this process, started at the first call."""
    return Gateway()


def _before(line: Line, body: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the messages, without instructions, up to the response that a body names in `previous_response_id`."""
    name = body.get("previous_response_id")
    if not name:
        return []
    for pending in line.calls:
        if pending.id == name and isinstance(pending.reply, Reply):
            return [*pending.call.messages[pending.instructed :], pending.reply.message]
    raise Refusal(f"there is no response {name} in this episode")


async def _json(request: web.Request) -> dict[str, Any]:
    body = json.loads(await request.read())
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return body


async def _answered(request: web.Request, protocol: Protocol, pending: Pending, streamed: bool) -> web.StreamResponse:
    """Send keep-alive bytes until the reply is complete, and then the reply.

    A refusal within the first ``WAITING_SECONDS`` is sent with its HTTP status, a later refusal only in the body.
    """
    with suppress(TimeoutError):
        await asyncio.wait_for(pending.answered.wait(), WAITING_SECONDS)
    if isinstance(pending.reply, Refusal):
        return _refused(pending.reply)
    response = web.StreamResponse(headers={"x-request-id": pending.id})
    response.content_type = "text/event-stream" if streamed else "application/json"
    try:
        await response.prepare(request)
        while not pending.answered.is_set():
            await response.write(b": waiting\n\n" if streamed else b" ")
            with suppress(TimeoutError):
                await asyncio.wait_for(pending.answered.wait(), WAITING_SECONDS)
        async for part in _written(protocol, pending, streamed):
            await response.write(part)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        return response  # the client is gone; a retry gets this reply
    pending.delivered = isinstance(pending.reply, Reply)
    return response


async def _written(protocol: Protocol, pending: Pending, streamed: bool) -> AsyncIterator[bytes]:
    if isinstance(pending.reply, Refusal):
        error = json.dumps(_error(pending.reply))
        yield f"event: error\ndata: {error}\n\n".encode() if streamed else error.encode()
    elif isinstance(pending.reply, Reply) and streamed:
        for name, data in protocol.events(pending.id, pending.call, pending.reply):
            text = data if isinstance(data, str) else json.dumps(data)
            yield (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
    elif isinstance(pending.reply, Reply):
        yield json.dumps(protocol.write(pending.id, pending.call, pending.reply)).encode()


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": None, "param": None}}


def _refused(refusal: Refusal) -> web.Response:
    return web.json_response(_error(refusal), status=refusal.status, headers={"x-should-retry": "false"})
