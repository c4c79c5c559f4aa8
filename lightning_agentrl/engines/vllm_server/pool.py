"""Several servers as one: requests go to those with the right weights, and wait while there are none."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.answers import Lost, ServerFacts, Transfer, complaint
from lightning_agentrl.engines.vllm_server.routing import block_keys, choose, common_blocks
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from lightning_agentrl.errors import ConfigError

LOOK_SECONDS = 2.0  # between checks of servers that are not in use
TRIES = 5  # attempts at a request that fails although a server answers


class Delivery(Protocol):
    """A way to deliver weights to servers."""

    @property
    def needs(self) -> str:
        """What a server needs for it, as the end of an error message."""

    async def bring(self, server: VLLMServer, before: str) -> None:
        """Make a server, whose weights have the version ``before``, load them. Raises Lost or ValueError."""


@dataclass(frozen=True)
class Weights:
    """The weights that all servers must have."""

    version: str
    policy_version: int
    delivery: Delivery | None  # None: another process delivers them
    contents: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """By layout: the first server that has taken them, and the checksums of its weights."""


@dataclass(eq=False)
class Replica:
    """A server and its state."""

    server: VLLMServer
    used: bool = False  # it answers, fits the policy and has the weights
    in_flight: int = 0
    read: set[int] = field(default_factory=set)  # block keys of the prompts it has read since the last update
    why: Exception | None = None  # why it is not used
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """A pool of servers. All of it runs on one event loop.

    Args:
        servers: the servers, at least one.
        sizes: sizes of the policy, see :func:`complaint`; empty to accept any model.
        max_model_len: most tokens of a prompt with its reply.
        stop_token_ids: tokens that end a reply.
        transfer: how weights get to them.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        sizes: Mapping[str, Any],
        max_model_len: int,
        stop_token_ids: Sequence[int],
        transfer: Transfer = "folder",
    ) -> None:
        self.replicas = [Replica(server) for server in servers]
        self.sizes, self.max_model_len, self.stop_token_ids, self.transfer = (
            sizes,
            max_model_len,
            stop_token_ids,
            transfer,
        )
        self._weights: Weights | None = None
        self._some_used = asyncio.Event()
        self._told_waiting = False

    async def inspect(self) -> list[ServerFacts]:
        """Inspect all servers, of which some need not answer.

        Raises:
            ConfigError: none answers, or one does not fit; with the remedy.
        """
        facts, silent = [], []
        for replica, found in zip(
            self.replicas, await asyncio.gather(*map(self._facts, self.replicas), return_exceptions=True), strict=True
        ):
            if isinstance(found, Lost):
                silent.append((replica, found))
            elif isinstance(found, BaseException):
                raise found
            else:
                facts.append(found)
        if not facts:
            told = "; ".join(f"{replica.server.url}: {error}" for replica, error in silent)
            raise ConfigError(
                f"no vLLM server answers ({told}); start one with `agentrl serve` and the model of the run, or "
                f"change {KEY}.urls"
            )
        return facts

    async def update(self, weights: Weights) -> None:
        """Update the weights of all servers that answer; the others get them when they are back.

        Raises:
            ConfigError: no server takes them, though one answers.
        """
        self._weights = weights
        self._some_used.clear()
        for replica in self.replicas:
            replica.used = False
        refusals = await asyncio.gather(*map(self._admit, self.replicas), return_exceptions=True)
        for refusal in refusals:
            if refusal is not None and not (isinstance(refusal, ValueError) and self._some_used.is_set()):
                raise refusal

    async def ask(self, request: SamplingRequest) -> Reply:
        """Sample one reply, on another server if one fails; wait while there is no server.

        Raises:
            ConfigError: a server's answer is not a complete reply, or the request has failed too often.
        """
        keys, faults = block_keys(request.prompt), list[Lost]()
        while True:
            replica = await self._next(keys)
            weights = self._weights
            assert weights is not None
            replica.in_flight += 1
            replica.read.update(keys)
            try:
                return await replica.server.generate(
                    request, self.stop_token_ids, weights.version, weights.policy_version
                )
            except Lost as error:
                faults.append(error)
            except ValueError as error:
                raise ConfigError(f"the server {replica.server.url} {error}") from error
            finally:
                replica.in_flight -= 1
            if len(faults) >= TRIES:
                raise ConfigError(
                    f"a reply has failed {TRIES} times, last on the server {replica.server.url} ({faults[-1]}); "
                    "look at its output"
                ) from faults[-1]
            await self._look_after(replica, faults)

    async def mind(self) -> None:
        """Keep putting servers that are back into use, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._weights is not None:
                await asyncio.gather(*(self._try_again(r) for r in self.replicas if not r.used))

    async def _next(self, keys: Sequence[int]) -> Replica:
        while not (used := [replica for replica in self.replicas if replica.used]):
            self._some_used.clear()
            if not self._told_waiting:
                self._told_waiting = True
                _warn(f"no vLLM server is left ({self._reasons()}); waiting until one is back")
            await self._some_used.wait()
        common = [common_blocks(keys, replica.read) for replica in used]
        return used[choose(len(keys), common, [replica.in_flight for replica in used])]

    async def _look_after(self, replica: Replica, faults: Sequence[Lost]) -> None:
        """Drop a server that is gone or lost its weights after a fault; else give it a moment."""
        if not await replica.server.is_healthy():
            self._drop(replica, faults[-1])
        elif self._weights and await _has(replica.server, self._weights.version):
            await asyncio.sleep(back_off(len(faults)))
        else:
            self._drop(replica, Lost("it was restarted and has its initial weights"))

    async def _facts(self, replica: Replica) -> ServerFacts:
        """Return the facts of a server, or raise a ConfigError if it does not fit."""
        try:
            facts = await replica.server.facts()
        except ValueError as error:
            raise ConfigError(f"the server {replica.server.url} {error}") from error
        if told := complaint(facts, self.sizes, self.max_model_len, self.transfer):
            raise ConfigError(f"the server {replica.server.url} {told}")
        return facts

    async def _admit(self, replica: Replica) -> None:
        """Deliver the weights to a server and use it; drop it if it does not answer.

        Raises:
            ConfigError: it does not fit, or refuses the weights.
        """
        async with replica.admitting:
            if replica.used:  # put into use meanwhile: replies are being sampled
                return
            weights = self._weights
            assert weights is not None
            try:
                await self._facts(replica)
                if weights.delivery is not None:
                    await self._load(replica, weights.delivery, weights.version)
                    await self._agree(replica, weights)
                elif not await _has(replica.server, weights.version):
                    raise Lost("it does not have the current weights yet")
            except Lost as error:
                self._drop(replica, error)
                return
            except ConfigError as error:
                self._drop(replica, error)
                raise
            if weights is not self._weights:  # there are newer ones, whose delivery waits for the lock
                return
            replica.read.clear()
            if replica.why is not None:
                rank_zero_info(f"the vLLM server {replica.server.url} is used again")
            replica.used, replica.why, self._told_waiting = True, None, False
            self._some_used.set()

    async def _load(self, replica: Replica, delivery: Delivery, version: str) -> None:
        try:
            await replica.server.load(delivery.bring, version)
        except (Lost, ValueError) as error:
            if isinstance(error, Lost) and not await replica.server.is_healthy():
                raise
            raise ConfigError(
                f"the server {replica.server.url} cannot take the weights of the policy: {error}; it must serve the "
                f"same model and {delivery.needs}"
            ) from error

    async def _agree(self, replica: Replica, weights: Weights) -> None:
        """Refuse a server whose weights have other bits than those of a server of equal layout. Only one says so."""
        if len(self.replicas) == 1:
            return
        layout, content = await replica.server.checksums()
        other, expected = weights.contents.setdefault(layout, (replica.server.url, content))
        if content != expected:
            raise ConfigError(
                f"the server {replica.server.url} holds other weights than {other} after the same update; one of them "
                "takes it over wrongly: start both again"
            )

    async def _try_again(self, replica: Replica) -> None:
        try:
            await self._admit(replica)
        except Exception as error:  # noqa: BLE001 - reported; the others go on, and this one may be restarted
            self._drop(replica, error)

    def _drop(self, replica: Replica, why: Exception) -> None:
        """Stop using a server, with one warning until it is used again or fails for another reason."""
        before, replica.used, replica.why = replica.why, False, why
        gone = isinstance(before, Lost) and isinstance(why, Lost)
        if gone or str(before) == str(why):
            return
        others = sum(other.used for other in self.replicas)
        _warn(
            f"the vLLM server {replica.server.url} is not used: {why}; {others} of {len(self.replicas)} are left, and "
            f"it is tried again every {LOOK_SECONDS:g} s"
        )

    def _reasons(self) -> str:
        return "; ".join(f"{replica.server.url}: {replica.why}" for replica in self.replicas)


def back_off(faults: int) -> float:
    """Return the seconds before a request is retried; doubled with every fault, at most 2."""
    return min(0.1 * 2**faults, 2.0)


async def _has(server: VLLMServer, version: str) -> bool:
    try:
        return await server.weight_version() == version
    except (Lost, ValueError):
        return False


def _warn(text: str) -> None:
    """Warn with the time, since Python shows equal warnings only once."""
    warnings.warn(f"{time.strftime('%H:%M:%S')} {text}", stacklevel=3)
