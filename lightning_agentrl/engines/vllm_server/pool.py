"""Several servers as one: requests go to those that are there with the right weights, and wait while there are none."""

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

LOOK_SECONDS = 2.0  # between two looks at servers that are not used
TRIES = 5  # of a request that fails although a server is there


class Delivery(Protocol):
    """A way of weights to servers."""

    @property
    def needs(self) -> str:
        """What a server must have for it, for those who read that one took no weights."""

    async def bring(self, server: VLLMServer, before: str) -> None:
        """Let a server load them, whose weights have the version ``before``. Raises Lost or ValueError."""


@dataclass(frozen=True)
class Weights:
    """The weights that all servers have to have."""

    version: str
    policy_version: int
    delivery: Delivery | None  # None: another process lets the servers load them


@dataclass(eq=False)
class Replica:
    """A server, and what is known of it."""

    server: VLLMServer
    used: bool = False  # it is there, fits the policy and has the weights
    in_flight: int = 0
    read: set[int] = field(default_factory=set)  # block keys of the prompts it was given since the last update
    why: Exception | None = None  # it is not used
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """All of it runs on one event loop.

    Args:
        servers: at least one.
        sizes: of the policy, see :func:`complaint`; none to take any model.
        max_model_len: tokens of a prompt and its reply, at most.
        stop_token_ids: tokens that end a reply.
        transfer: how weights come to them.
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
        """Look at all servers; some need not answer.

        Raises:
            ConfigError: none answers, or one does not fit; with what to do.
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
        """Let all servers that are there take new weights; the others get them when they are back.

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
        """Sample one reply, on another server if one fails; wait while there is none.

        Raises:
            ConfigError: a server's answer is no whole reply, or the request has failed too often.
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
                    f"a reply has failed {TRIES} times, at last on the server {replica.server.url} ({faults[-1]}); "
                    "look at what it writes"
                ) from faults[-1]
            await self._look_after(replica, faults)

    async def mind(self) -> None:
        """Take servers in use that are back, for ever."""
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
        """After a fault: drop a server that is gone or lost its weights, else give it a moment."""
        if not await replica.server.is_healthy():
            self._drop(replica, faults[-1])
        elif self._weights and await _has(replica.server, self._weights.version):
            await asyncio.sleep(back_off(len(faults)))
        else:
            self._drop(replica, Lost("it was started again and has the weights of its start"))

    async def _facts(self, replica: Replica) -> ServerFacts:
        """Raises ConfigError when the server does not fit."""
        try:
            facts = await replica.server.facts()
        except ValueError as error:
            raise ConfigError(f"the server {replica.server.url} {error}") from error
        if told := complaint(facts, self.sizes, self.max_model_len, self.transfer):
            raise ConfigError(f"the server {replica.server.url} {told}")
        return facts

    async def _admit(self, replica: Replica) -> None:
        """Give a server the weights and use it; one that is not there is dropped.

        Raises:
            ConfigError: it does not fit, or does not take the weights.
        """
        async with replica.admitting:
            if replica.used:  # somebody else was first, and replies are being sampled
                return
            weights = self._weights
            assert weights is not None
            try:
                await self._facts(replica)
                if weights.delivery is not None:
                    await self._load(replica, weights.delivery, weights.version)
                elif not await _has(replica.server, weights.version):
                    raise Lost("it does not have the current weights yet")
            except Lost as error:
                self._drop(replica, error)
                return
            except ConfigError as error:
                self._drop(replica, error)
                raise
            if weights is not self._weights:  # newer ones have come, and whoever brought them waits for the lock
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

    async def _try_again(self, replica: Replica) -> None:
        try:
            await self._admit(replica)
        except Exception as error:  # noqa: BLE001 - told; others go on, and this one may be started anew
            self._drop(replica, error)

    def _drop(self, replica: Replica, why: Exception) -> None:
        """Use a server no longer. Said once until it is used again or something else is wrong with it."""
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
    """Seconds before a request is tried again on a server that is there; doubled with every fault, 2 at most."""
    return min(0.1 * 2**faults, 2.0)


async def _has(server: VLLMServer, version: str) -> bool:
    try:
        return await server.weight_version() == version
    except (Lost, ValueError):
        return False


def _warn(text: str) -> None:
    """With the time, since Python shows equal warnings once."""
    warnings.warn(f"{time.strftime('%H:%M:%S')} {text}", stacklevel=3)
