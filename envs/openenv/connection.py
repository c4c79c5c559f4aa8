"""A session with an OpenEnv server: the web socket and the errors.

All sockets of a process are read in one thread with an event loop, also between requests: a server that gets no answer
to its pings for some 20 seconds closes the socket, and the update of an iteration may take minutes.
"""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")

PROTOCOL = "the protocol of openenv 0.10"
_MOST_BYTES = 100 * 2**20  # largest message, as in OpenEnv's own client
_CLOSING_SECONDS = 2.0
_AWAY = (502, 503, 504)  # status codes that a proxy sends while its server starts
_PAUSE_SECONDS = 0.25


class LostSocketError(ConnectionError):
    """The socket was lost, and therefore the environment at the server, too."""


class ProtocolError(RuntimeError):
    """A server sent an answer that violates OpenEnv's protocol."""


class ServerError(RuntimeError):
    """A server refused a message, or has no environment."""


class EnvironmentAtServerError(ServerError):
    """The environment raised an error at its server. The session can continue, but the episode should end."""


class ServerFullError(RuntimeError):
    """The server holds as many sessions as it allows."""


class _Known:
    """State of a server, as this process has observed it.

    Attributes:
        open: connections whose sockets are open.
        most: largest number of sockets at the same time; 0 if the server never answered or did not come back in time.
    """

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self.most = 0


_servers: defaultdict[str, _Known] = defaultdict(_Known)  # address -> state of the server


class Connection:
    """An open web socket with a session behind it.

    An error closes the socket, since the next message of the server may answer an earlier request.

    Args:
        url: address of the server, without `/ws`.
        seconds: time limit for opening the socket, and for each answer.
        token: token that the server requires; an empty text means no token.

    Raises:
        ConnectionError: no server answers at the address.
        ProtocolError: the server has no web socket, or uses another protocol.
        ServerError: the server has no environment for this session.
        ServerFullError: the server already has as many sessions as it allows.
        TimeoutError: the server does not answer in time.
    """

    def __init__(self, url: str, seconds: float, token: str = "") -> None:
        self.url, self.seconds = url, seconds
        self._answers: asyncio.Queue[str | None] = asyncio.Queue(2)  # None means that the socket was lost
        _run(self._open(token), url, seconds)
        with suppress(EnvironmentAtServerError):  # some environments have no state before the first reset
            self.ask({"type": "state"})
        known = _servers[url]
        known.open.add(self)
        known.most = max(known.most, len(known.open))

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer.

        Raises:
            EnvironmentAtServerError: the environment raised an error.
            LostSocketError: the socket is lost, or was lost earlier.
            ServerError: the answer is an error.
            ServerFullError: the answer is the error that the server is full.
            ProtocolError: an answer was not requested, or cannot be read.
            TimeoutError: the answer does not come in time.
        """
        try:
            answer = _run(self._exchange(json.dumps(message)), self.url, self.seconds)
            return self._read(*answer, "state" if message["type"] == "state" else "observation")
        except Exception as error:
            if not isinstance(error, EnvironmentAtServerError):
                self.close()
            raise

    def close(self) -> None:
        """Close the socket, if it is still open."""
        _servers[self.url].open.discard(self)
        with suppress(ConnectionError, TimeoutError, ProtocolError):
            _run(self._close(), self.url, _CLOSING_SECONDS)

    async def _open(self, token: str) -> None:
        self._session = aiohttp.ClientSession(headers=_headers(token))
        try:
            closing = aiohttp.ClientWSTimeout(ws_close=_CLOSING_SECONDS / 2)
            self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=_MOST_BYTES, timeout=closing)
        except BaseException:
            await self._session.close()
            raise
        self._reader = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        try:
            async for message in self._socket:
                await self._answers.put(message.data if message.type is aiohttp.WSMsgType.TEXT else None)
        finally:
            with suppress(asyncio.QueueFull):  # a full queue holds an unrequested message, which ends the session, too
                self._answers.put_nowait(None)

    async def _exchange(self, text: str) -> tuple[str | None, bool]:
        """Return an answer (None if the socket was lost), and whether this answer was requested."""
        if not self._answers.empty():
            return self._answers.get_nowait(), False
        with suppress(ConnectionResetError):  # the reader detects the lost socket, and may still have a message
            await self._socket.send_str(text)
        return await self._answers.get(), True

    async def _close(self) -> None:
        self._reader.cancel()
        try:
            with suppress(ConnectionResetError):
                await self._socket.send_str('{"type": "close"}')
            await self._socket.close()
        finally:
            await self._session.close()

    def _read(self, text: str | None, asked: bool, wanted: str) -> dict[str, Any]:
        if text is None:
            raise LostSocketError(f"the socket of the server at {self.url} is lost, and with it the environment there")
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError, RecursionError):
            kind, data = "", None
        if kind == "error" and isinstance(data, dict):
            code, why = data.get("code"), " ".join(str(data.get("message")).split())
            if code == "CAPACITY_REACHED":
                raise ServerFullError(
                    f"the server at {self.url} has no place for another session ({_shown(why)}); its author allows "
                    "more with create_app(..., max_concurrent_envs=16) and SUPPORTS_CONCURRENT_SESSIONS = True, or "
                    "play fewer environments at a time"
                )
            cls = EnvironmentAtServerError if code == "EXECUTION_ERROR" else ServerError
            raise cls(f"the server at {self.url} answered {code}: {_shown(why)}")
        if kind != wanted or not isinstance(data, dict):
            raise ProtocolError(
                f"the server at {self.url} answered {_shown(text)} in place of a message of the type {wanted}; this "
                f"client speaks {PROTOCOL}"
            )
        if not asked:
            raise ProtocolError(f"the server at {self.url} sent an answer that was not asked for: {_shown(text)}")
        return data


def fetch_schema(url: str, seconds: float, token: str = "") -> dict[str, Any]:
    """Return a server's answer to `/schema`.

    Raises:
        ValueError: the server is not an OpenEnv server, or refuses the token.
        ConnectionError: no server answers at the address.
        TimeoutError: the server does not answer in time.
    """
    status, text = _run(_get(f"{url}/schema", token), url, seconds)
    if status in _AWAY:
        raise ConnectionError(f"no server answers at {url} (status {status})")
    if status == 401:
        raise ValueError(f"the server at {url} refuses the token; give the one it was started with as argument token")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    parts = [schema.get(name) for name in ("action", "observation")] if isinstance(schema, dict) else []
    if status != 200 or not parts or not all(isinstance(part, dict) for part in parts):
        raise ValueError(
            f"what answers at {url} is no OpenEnv environment: its /schema gives status {status} and {_shown(text)} "
            "in place of the schemas of action and observation"
        )
    assert isinstance(schema, dict)
    return schema


def reach(call: Callable[[str, float], T], url: str, seconds: float) -> T:
    """Call a function that connects to a server; a server that has answered before gets `seconds` to come back.

    Such a server may be restarting, or may still count the session of a lost socket. Without a wait, environments
    would lose many episodes within a moment. After a server did not come back in time, later calls do not wait for it.

    Args:
        call: function that takes the address and a time limit in seconds.
        url: address of the server.
        seconds: longest wait in seconds.
    """
    known, end = _servers[url], time.monotonic() + seconds
    while True:
        try:
            return call(url, seconds)
        except (ConnectionError, ServerFullError) as error:
            taken = len(known.open) if isinstance(error, ServerFullError) else 0
            if known.most <= taken or time.monotonic() + _PAUSE_SECONDS > end:
                known.most = taken
                raise
            time.sleep(_PAUSE_SECONDS)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _get(url: str, token: str) -> tuple[int, str]:
    async with aiohttp.ClientSession(headers=_headers(token)) as session, session.get(url) as answer:
        text = bytearray()
        async for part in answer.content.iter_any():  # `read` would return only the bytes that have arrived so far
            text += part
            if len(text) > _MOST_BYTES:
                break
        return answer.status, text[:_MOST_BYTES].decode(errors="replace")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()
    return loop


def _run(call: Coroutine[Any, Any, T], url: str, seconds: float) -> T:
    """Run a coroutine in the thread of the sockets and wait for the result; error messages name the address."""
    try:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, seconds), _loop()).result()
    except TimeoutError:
        raise TimeoutError(f"the server at {url} took longer than timeout_seconds ({seconds:g})") from None
    except aiohttp.WSServerHandshakeError as error:
        if error.status in _AWAY:
            raise ConnectionError(f"no server answers at {url} (status {error.status})") from None
        raise ProtocolError(
            f"the server at {url} has no web socket at /ws (status {error.status}), so it speaks another version of "
            f"OpenEnv's protocol; this client speaks {PROTOCOL}"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionError(f"no server answers at {url} ({_short(str(error), 200)})") from None


def _shown(text: str) -> str:
    return repr(_short(text, 120))


def _short(text: str, most: int) -> str:
    text = " ".join(text[:1000].split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
