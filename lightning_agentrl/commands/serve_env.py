"""`agentrl serve-env`: OpenEnv server with one environment per web socket, for other trainers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Handler, Middleware

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.env_worker import EnvWorker, Start, make_worker
from lightning_agentrl.episodes.environment import Answer, png
from lightning_agentrl.episodes.recipe import ENV, Recipe
from lightning_agentrl.errors import ConfigError, EnvError
from lightning_agentrl.errors.secrets import check_secrets, filled

_NOT_TOLD = ("render_mode", "worker", "deterministic")  # fields of the contract that matter only on the server
_MOST_BYTES = 4 * 2**20  # largest size of a message, enough for an action of some million characters
_MOST_WAITING = 16  # unanswered messages of a socket; clients should wait for each answer
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PING_SECONDS = 30.0  # time between pings; the environment of a client that does not answer is closed
_ENDING_SECONDS = 3.0  # time for running steps when the server ends; a thread cannot be stopped
_TEXT = {"type": "string"}
_PNG = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}
_SCHEMA = {
    "action": {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]},
    "observation": {
        "type": "object",
        "properties": {"text": _TEXT, "images": {"type": "array", "items": _PNG}},
        "required": ["text"],
    },
    "state": {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}},
}


class _Refused(Exception):
    """Raised for a message that is answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Played:
    """The environment of one socket."""

    worker: EnvWorker
    episode: int = -1
    episode_id: str = ""
    steps: int = 0
    running: bool = False
    known: Contract | None = None  # contract that was sent to the client

    async def reply(self, text: str) -> dict[str, Any] | None:
        """Return the answer to a message, or None if the message closes the socket."""
        try:
            kind, data = _parsed(text)
            if kind == "close":
                return None
            if kind == "state":
                return {"type": "state", "data": {"episode_id": self.episode_id, "step_count": self.steps}}
            answer = await (self._reset(data) if kind == "reset" else self._step(data))
            observed = self._observation_data(answer, kind == "reset")
            if answer.images:
                observed["observation"]["images"] = await asyncio.to_thread(_encoded, answer.images)
            return {"type": "observation", "data": observed}
        except (_Refused, EnvError) as error:
            code = error.code if isinstance(error, _Refused) else "EXECUTION_ERROR"
            return {"type": "error", "data": {"message": str(error), "code": code}}

    async def _reset(self, data: Mapping[str, Any]) -> Answer:
        seed = data.get("seed")
        if other := set(data) - {"seed", "episode_id"}:
            raise _Refused("VALIDATION_ERROR", f"reset takes seed and episode_id, not {', '.join(sorted(other))}")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise _Refused("VALIDATION_ERROR", f"seed must be an integer of at least 0, not {seed!r}")
        self.running, self.steps, self.known = False, 0, None
        self.episode += 1
        self.episode_id = str(data.get("episode_id") or self.episode)
        answer = await self.worker.reset(Start(0, self.episode, secrets.randbelow(2**31) if seed is None else seed))
        self.running = True
        return answer

    async def _step(self, data: Mapping[str, Any]) -> Answer:
        if set(data) - {"metadata"} != {"text"} or not isinstance(data["text"], str):
            raise _Refused("VALIDATION_ERROR", "an action has one field, text, a string")
        if not self.running:
            raise _Refused("EXECUTION_ERROR", "the episode is over or has not begun; send reset")
        self.running = False  # if the step fails, `running` stays False
        answer = await self.worker.step(data["text"])
        self.steps += 1
        self.running = not (answer.terminated or answer.truncated)
        return answer

    def _observation_data(self, answer: Answer, first: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            # If both flags are set, training counts termination.
            "truncated": answer.truncated and not answer.terminated,
            "long_term_text": answer.observation,
            "short_term_text": answer.short_term,
            "metrics": {name: value for name, value in answer.metrics.items() if math.isfinite(value)},
        }
        readers = {"success": bool, "progression": float, "executed_action": str, "invalid_action": bool}
        metadata |= {
            name: read(answer.info[name]) for name, read in readers.items() if answer.info.get(name) is not None
        }
        if not math.isfinite(metadata.get("progression", 0.0)):  # JSON has no NaN or infinity
            del metadata["progression"]
        offered = {
            one.name: getattr(answer.contract, one.name) for one in fields(Contract) if one.name not in _NOT_TOLD
        }
        metadata |= {name: value for name, value in offered.items() if getattr(self.known, name, ...) != value}
        if answer.messages:
            metadata["own_messages"] = [
                {"role": role, "content": [_item(part) for part in parts]} for role, parts in answer.messages
            ]
        self.known = answer.contract
        return {
            "observation": {"text": answer.text, "metadata": metadata},
            "metadata": metadata,
            "reward": None if first else answer.reward,
            "done": answer.terminated or answer.truncated,
        }


def _encoded(images: Sequence[np.ndarray]) -> list[str]:
    """Return each image as a PNG in base64."""
    return [b64encode(png((image,))).decode() for image in images]


def _item(part: str | None) -> dict[str, str]:
    """Return a text part of a message; None is the placeholder of the next image."""
    return {"type": "image"} if part is None else {"type": "text", "text": part}


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Refused("INVALID_JSON", f"the message is not JSON: {error}") from None
    kind = message.get("type") if isinstance(message, dict) else None
    if kind not in ("reset", "step", "state", "close"):
        raise _Refused("UNKNOWN_TYPE", f"a message has the type reset, step, state or close, not {str(kind)[:80]!r}")
    data = message.get("data", {})
    if not isinstance(data, dict):
        raise _Refused("VALIDATION_ERROR", f"the data of {kind} must be an object")
    return kind, data


@web.middleware
async def _refuse_sites(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests that a browser sends for pages of other sites."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise web.HTTPForbidden(text=f"pages of {origin} may not use this server")
    return await handler(request)


@web.middleware
async def _refuse_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse host names other than loopback names, since a web page can let its own name resolve to this machine."""
    if urlsplit(f"//{request.host}").hostname not in _LOOPBACK:
        raise web.HTTPForbidden(text=f"this server is not {request.host}; start it with --token to allow this")
    return await handler(request)


def _token_needed(token: str) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not secrets.compare_digest(_given_token(request).encode(), token.encode()):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        return await handler(request)

    return check


def _given_token(request: web.Request) -> str:
    """Return the bearer token, or the password of a URL such as http://user:token@host, for clients without headers."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind == "Basic":
        with suppress(ValueError):
            return b64decode(value).decode().partition(":")[2]
    return value if kind == "Bearer" else ""


def environment_app(recipe: Recipe, sessions: int, token: str = "") -> web.Application:
    """Return a server application with a separate environment for each web socket.

    Args:
        recipe: recipe of the environments.
        sessions: largest number of concurrent sockets.
        token: secret that clients must send; empty: no secret is needed, and only loopback host names are accepted.
    """
    sockets: set[web.WebSocketResponse] = set()

    async def play(request: web.Request) -> web.WebSocketResponse:
        connected = web.WebSocketResponse(max_msg_size=_MOST_BYTES, heartbeat=_PING_SECONDS)
        await connected.prepare(request)
        if len(sockets) >= sessions:
            why = f"{sessions} of {sessions} sessions are in use"
            if left := sum(other.closed for other in sockets):
                why += f", {left} of them by running calls of clients that have disconnected"
            await connected.send_json({"type": "error", "data": {"message": why, "code": "CAPACITY_REACHED"}})
            await connected.close()
            return connected
        sockets.add(connected)
        pool = ThreadPoolExecutor(1)  # one thread per environment, so that a hanging call blocks only one environment
        try:
            await _play(connected, recipe, pool)
        finally:
            pool.shutdown(wait=False)
            sockets.discard(connected)
        return connected

    async def end(app: web.Application) -> None:
        for connected in list(sockets):
            await connected.close()

    def giving(content: Any) -> Handler:
        async def give(request: web.Request) -> web.StreamResponse:
            return web.json_response(content)

        return give

    app = web.Application(middlewares=[_refuse_sites, _token_needed(token) if token else _refuse_names])
    app.router.add_get("/health", giving({"status": "healthy"}))
    app.router.add_get("/schema", giving(_SCHEMA))
    app.router.add_get("/metadata", giving({"name": recipe.id, "description": "a text environment", "version": None}))
    app.router.add_get("/ws", play)
    app.on_shutdown.append(end)
    return app


async def _play(connected: web.WebSocketResponse, recipe: Recipe, pool: ThreadPoolExecutor) -> None:
    """Answer the messages of a socket in order, and pings at any time.

    When the client disconnects, a running call is canceled if possible, and the environment is closed afterwards.
    """
    try:
        worker = await asyncio.get_running_loop().run_in_executor(pool, make_worker, recipe, pool)
    except (EnvError, ValueError) as error:
        await connected.send_json({"type": "error", "data": {"message": str(error), "code": "FACTORY_ERROR"}})
        return
    played, asked, told_to_close = _Played(worker), asyncio.Queue[str](_MOST_WAITING), False

    async def reply() -> None:
        nonlocal told_to_close
        while (answer := await played.reply(await asked.get())) is not None:
            with suppress(ConnectionResetError):  # the client has disconnected meanwhile
                await connected.send_json(answer)
        told_to_close = True
        await connected.close()

    try:
        async with asyncio.TaskGroup() as tasks:
            replies = tasks.create_task(reply())
            async for message in connected:
                if asked.full():
                    why = f"send the next message after the answer; {_MOST_WAITING} are waiting"
                    await connected.close(code=WSCloseCode.POLICY_VIOLATION, message=why.encode())
                elif message.type is WSMsgType.TEXT:
                    asked.put_nowait(message.data)
                elif message.type is WSMsgType.BINARY:  # answer binary messages, too, since clients wait
                    asked.put_nowait(message.data.decode(errors="replace"))
            if not told_to_close:
                replies.cancel()
    finally:
        await worker.aclose()


def serve_env(
    id: str,
    port: int = 8000,
    host: str = "127.0.0.1",
    kwargs: dict[str, Any] | None = None,
    sessions: int = 64,
    token: str = "",
) -> None:
    """Start an OpenEnv server for an environment, with one instance per web socket.

    Args:
        id: id of the environment, as data.init_args.env.id.
        port: port to listen on, or 0 for a free port.
        host: address to listen on. An address that other machines can reach requires a token.
        kwargs: arguments of the environment, as data.init_args.env.kwargs.
        sessions: largest number of concurrent environments.
        token: secret that clients must send. Write '${NAME}' to read the token from an environment variable.

    Raises:
        ValueError: the environment cannot be created or played, the address cannot be used, or the token is missing.
    """
    token = filled(token, "--token")
    if not token and host not in _LOOPBACK:
        raise ValueError(
            f"--host is {host}, where other machines may reach the server; add --token '${{NAME}}' with the "
            "environment variable that holds a secret, or leave --host out"
        )
    try:
        check_secrets(kwargs)
        recipe = Recipe(id, kwargs or {}, ENV)
        worker = make_worker(recipe)
        worker.reset_now(Start(0, 0, 0))
        worker.close()
    except ConfigError as error:
        raise ConfigError(replace(error.problem, key="")) from error
    except EnvError as error:
        raise ValueError(str(error)) from error
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:  # the address is in use or not of this machine, or the port is invalid
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}, port {port}: {why}; choose another --port or --host") from error
    address = f"[{host}]" if ":" in host else host
    print(f"{id} at http://{address}:{listening.getsockname()[1]}", flush=True)
    web.run_app(environment_app(recipe, sessions, token), sock=listening, print=None, shutdown_timeout=1.0)
    timer = threading.Timer(_ENDING_SECONDS, os._exit, [0])  # end the process, which would wait for its threads
    timer.daemon = True
    timer.start()
