"""Requests to one running vLLM server over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY, sampling_arguments
from lightning_agentrl.engines.vllm_server.answers import (
    LOADING,
    Lost,
    ServerFacts,
    Unusable,
    read_facts,
    read_reply,
    reading,
)
from lightning_agentrl.engines.vllm_server.deadlines import Deadlines
from lightning_agentrl.errors import one_line
from lightning_agentrl.errors.secrets import filled
from lightning_agentrl.vllm_worker.extension import WorkerExtension

if TYPE_CHECKING:
    import aiohttp

POLICY_SIZES = WorkerExtension.policy_sizes.__name__
MOST_BYTES = 256 * 2**20  # of an answer; a reply has some hundred bytes per token
LATER = (408, 425, 429)  # with these a proxy says that it may be asked again


def open_session(patience: float) -> aiohttp.ClientSession:
    """Open a session for any number of servers, with a connection per request: servers close idle ones at any time.

    Args:
        patience: most seconds to connect.
    """
    import aiohttp  # slow, and few runs have servers

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=patience))


@dataclass(frozen=True)
class Delivery:
    """One version of the weights, and how servers get it."""

    needs: str  # what a server needs for it, as the end of an error message
    size: int  # bytes of the weights
    bring: Callable[[VLLMServer, str], Awaitable[None]]
    """Makes a server load them, given the version of its weights. Raises Lost or ValueError."""


class VLLMServer:
    """A server at an address, running or not.

    Args:
        url: address such as http://127.0.0.1:8001; ``${NAME}`` stands for an environment variable.
        session: the HTTP session to use.
        patience: seconds that it may take for an answer, besides those that its work takes.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, patience: float) -> None:
        self.url = url
        self.deadlines = Deadlines(patience)
        self._session = session

    async def probe(self, unread: int = 0) -> None:
        """Wait for an answer of its engine and all workers; the route for health only tells whether they have ended.

        Args:
            unread: prompt tokens of the requests in flight that it had not read before.

        Raises:
            Unusable: it does not come in time, or cannot be read.
            Lost: the server or its engine has ended.
        """
        seconds = self.deadlines.answer(unread)
        await self._call("POST", "/collective_rpc", seconds, {"method": POLICY_SIZES})

    async def facts(self) -> ServerFacts:
        """Return what the server reports about itself, or raise an error if it was not started to take weights."""
        version, models, info = [
            await self._tell(path) for path in ("/version", "/v1/models", "/server_info?config_format=json")
        ]
        try:
            sizes = await self._call("POST", "/collective_rpc", self.deadlines.answer(0), {"method": POLICY_SIZES})
        except Unusable:
            raise
        except Lost as error:
            await self._tell("/health")  # it runs, but does not know that method
            raise ValueError(f"reports no sizes of its model ({error}); start it with `agentrl serve`") from error
        with reading("reports its settings"):
            return read_facts(version, models, info, sizes)

    async def weight_version(self) -> str:
        """Return the version of its weights that was set last."""
        return str((await self._tell("/weight_info")).get("weight_version"))

    async def load(self, delivery: Delivery, version: str) -> None:
        """Make it load weights and drop its prefix cache, and check the version.

        Raises:
            Unusable: it has not loaded them in time, or an answer cannot be read.
            Lost: it went away meanwhile.
            ValueError: it cannot load them, or has others afterwards.
        """
        limit, start = self.deadlines.load(delivery.size), time.monotonic()
        try:
            async with asyncio.timeout(limit):
                before, loading = await self.weight_version(), f"{LOADING}{version}"
                await self.post("/update_weight_version", {"new_version": loading})
                await delivery.bring(self, before)
                await self.call_workers(WorkerExtension.pack_experts.__name__)
                await self._forget_prefixes()
                await self._expect(loading)  # the same process as before, and nobody else's weights
                await self.post("/update_weight_version", {"new_version": version})
                await self._expect(version)
        except TimeoutError as error:
            self.deadlines.note_load(limit, in_time=False)
            raise Unusable(f"it has not loaded the weights within {limit:.0f} s") from error
        self.deadlines.note_load(time.monotonic() - start)

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all its workers, and return what each of them returned."""
        return (await self.post("/collective_rpc", {"method": method, "kwargs": arguments})).get("results") or []

    async def checksums(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the layouts and the checksums of the weights of its workers."""
        answers = await self.call_workers(WorkerExtension.weights_checksum.__name__)
        with reading("reports its checksums"):
            return tuple(layout for layout, _ in answers), tuple(content for _, content in answers)

    async def workers(self) -> int:
        """Return how many of its processes hold weights."""
        answer = await self._tell("/get_world_size")
        with reading("reports its number of processes"):
            return int(answer["world_size"])

    async def generate(
        self,
        request: SamplingRequest,
        stop_token_ids: Collection[int],
        vocabulary: int,
        version: str,
        policy_version: int,
    ) -> Reply:
        """Sample one reply.

        The answer comes when the reply is complete; who asks decides how long to wait.

        Raises:
            Lost: it went away or was restarted meanwhile; try again.
            Unusable: its answer is not a complete reply; ask another server.
            ValueError: it refused.
        """
        params = sampling_arguments(request, stop_token_ids)
        body = {"token_ids": list(request.prompt.ids), "sampling_params": params}
        answer = await self.post("/inference/v1/generate", body)
        return read_reply(answer, request, stop_token_ids, vocabulary, version, policy_version)

    async def _forget_prefixes(self) -> None:
        end = time.monotonic() + self.deadlines.patience / 2  # aborted requests may still be ending
        while time.monotonic() < end:
            if (await self.post("/reset_prefix_cache", {})).get("success"):
                return
            await asyncio.sleep(0.2)
        raise ValueError(
            "keeps its prefix cache, with keys and values of the old weights; something else samples from it: "
            "give each run servers of its own"
        )

    async def _expect(self, version: str) -> None:
        found = await self.weight_version()
        if found != version:
            raise Lost(f"its weights have the version {found} after an update to {version}")

    async def _tell(self, path: str) -> dict[str, Any]:
        """Return what it knows already."""
        return await self._call("GET", path, self.deadlines.patience)

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        """Return its answer, for which who asks decides how long to wait."""
        return await self._call("POST", path, None, body)

    async def _call(
        self, method: Literal["GET", "POST"], path: str, seconds: float | None, body: Any = None
    ) -> dict[str, Any]:
        import aiohttp

        try:
            async with asyncio.timeout(seconds):
                async with self._session.request(method, filled(self.url, f"{KEY}.urls") + path, json=body) as answer:
                    status, text = answer.status, await _text(answer)
        except TimeoutError as error:
            within = f" within {seconds:.0f} s" if seconds else ""
            raise Unusable(f"it has not answered {path}{within}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(one_line(str(error)) or f"no answer ({type(error).__name__})") from error
        if status >= 500 or status in LATER:
            raise Lost(f"it answered {path} with {status}: {_shortened(text)}")
        if status in (401, 403):
            raise ValueError(
                f"asks for a key ({path}: {status}), and none can be given; start it without --api-key, in a network "
                "of your own"
            )
        if status == 404:
            raise ValueError(f"knows no {path}; start it with `agentrl serve`, which turns it on")
        if status >= 400:
            raise ValueError(f"refused {path} with {status}: {_shortened(text)}")
        try:
            answer = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:  # also of numbers that are too long
            raise Unusable(
                f"it answered {path} with something other than JSON ({_shortened(text)}); start it with `agentrl serve`"
            ) from error
        return answer if isinstance(answer, dict) else {}


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Return the body; that of a proxy may have any encoding."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            raise Unusable(f"it answered {answer.url.path} with more than {MOST_BYTES} bytes")
    return body.decode(errors="replace")


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= 300 else f"{text[:300]} …"
