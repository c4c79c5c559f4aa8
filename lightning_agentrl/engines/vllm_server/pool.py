"""Several servers as one: requests go to those with the right weights, and wait while there are none."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.answers import Lost, ServerFacts, Unusable, complaint
from lightning_agentrl.engines.vllm_server.routing import BLOCK, block_keys, choose, common_blocks
from lightning_agentrl.engines.vllm_server.server import Delivery, VLLMServer
from lightning_agentrl.errors import ConfigError, EngineGoneError
from lightning_agentrl.types.model_input import ModelInput
from lightning_agentrl.vllm_worker.extension import Transfer

LOOK_SECONDS = 2.0  # between checks of a server
TRIES = 5  # attempts at a request that fails although a server answers


@dataclass(frozen=True)
class Weights:
    """The weights that all servers must have."""

    version: str
    policy_version: int
    delivery: Delivery | None  # None: another process delivers them
    contents: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """By layout: the first server that has taken them, and the checksums of its weights."""


@dataclass(eq=False)
class Sampling:
    """A request that a server is sampling."""

    task: asyncio.Task[Reply]
    max_tokens: int
    unread: int  # tokens of its prompt that the server had not read before
    in_flight: int  # requests that the server was sampling when this one had come
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


@dataclass(eq=False)
class Replica:
    """A server and its state."""

    server: VLLMServer
    used: bool = False  # it answers, fits the policy and has the weights
    in_flight: list[Sampling] = field(default_factory=list)
    read: set[int] = field(default_factory=set)  # block keys of the prompts it has read since the last update
    why: Exception | None = None  # why it is not used
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def unread(self) -> int:
        """Prompt tokens that it may have to read now."""
        return sum(sampling.unread for sampling in self.in_flight)


class ServerPool:
    """A pool of servers. All of it runs on one event loop.

    Args:
        servers: the servers, at least one.
        sizes: sizes of the policy, see :func:`complaint`; empty to accept any model, and sample nothing.
        max_model_len: most tokens of a prompt with its reply.
        stop_token_ids: tokens that end a reply.
        transfer: how weights get to them.
        wait_seconds: most seconds that requests wait while there is no server.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        sizes: Mapping[str, Any],
        max_model_len: int,
        stop_token_ids: Sequence[int],
        transfer: Transfer = "folder",
        wait_seconds: float = 0.0,
    ) -> None:
        self.replicas = [Replica(server) for server in servers]
        self.sizes, self.transfer = sizes, transfer
        self.max_model_len, self.stop_token_ids = max_model_len, stop_token_ids
        self.wait_seconds = wait_seconds
        self._weights: Weights | None = None  # None: no server has any, or an update is on its way
        self._some_used = asyncio.Event()
        self._waiting_since: float | None = None  # requests wait, since there is no server

    async def inspect(self) -> list[ServerFacts]:
        """Inspect all servers, of which some need not answer.

        Raises:
            ConfigError: none answers, or one does not fit; with the remedy.
        """
        found = await asyncio.gather(*map(self._facts, self.replicas), return_exceptions=True)
        for fault in found:
            if isinstance(fault, BaseException) and not isinstance(fault, Lost):
                raise fault
        facts = [one for one in found if isinstance(one, ServerFacts)]
        if not facts:
            urls = [replica.server.url for replica in self.replicas]
            why = "; ".join(f"{url}: {lost}" for url, lost in zip(urls, found, strict=True))
            raise ConfigError(
                f"no vLLM server answers ({why}); start one with `agentrl serve` and the model of the run, or "
                f"change {KEY}.urls"
            )
        return facts

    async def pause(self) -> None:
        """Leave the servers alone until the next update, which this process or another one makes."""
        self._weights = None

    async def update(self, weights: Weights) -> None:
        """Update the weights of the servers in use, or of all if none is; others get them when they are back.

        Raises:
            ConfigError: no server takes them, though one answers.
        """
        asked = [replica for replica in self.replicas if replica.used] or self.replicas
        self._weights = weights
        self._some_used.clear()
        for replica in self.replicas:
            replica.used = False
        faults = await asyncio.gather(*map(self._admit, asked))
        for fault in faults:
            if not (fault is None or isinstance(fault, Lost) or self._some_used.is_set()):
                raise fault

    async def ask(self, request: SamplingRequest) -> Reply:
        """Sample one reply, on another server if one fails, hangs or cannot be used; wait while there is no server.

        Raises:
            ConfigError: a server refuses the request.
            EngineGoneError: there has been no server for too long, or the request has failed too often.
        """
        keys, faults, failed = block_keys(request.prompt), list[Lost](), set[Replica]()
        while True:
            replica = await self._next(keys, failed)
            sampling = self._begin(replica, request, keys)
            try:
                await asyncio.wait([sampling.task])
            finally:
                sampling.task.cancel()
                replica.in_flight.remove(sampling)
            if sampling.task.cancelled():  # the server was dropped
                continue
            try:
                reply = sampling.task.result()
            except Lost as error:
                faults.append(error)
                failed.add(replica)
            except ValueError as error:
                raise ConfigError(f"the server {replica.server.url} {error}") from error
            else:
                in_flight = max(sampling.in_flight, 1 + len(replica.in_flight))
                replica.server.deadlines.note_reply(sampling.seconds, len(reply.ids), sampling.unread, in_flight)
                return reply
            if len(faults) >= TRIES:
                raise EngineGoneError(
                    f"a reply has failed {TRIES} times, last on the server {replica.server.url} ({faults[-1]}); "
                    "look at its output"
                ) from faults[-1]
            await self._look_after(replica, faults)

    async def mind(self) -> None:
        """Keep looking for servers that hang or are back, for ever."""
        await asyncio.gather(*map(self._mind, self.replicas))

    async def _mind(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._weights is None or replica.admitting.locked():  # which has deadlines of its own
                continue
            if replica.used:
                await self._check(replica)
            else:
                await self._admit(replica)

    async def _check(self, replica: Replica) -> None:
        """Drop a server whose engine does not answer, or that does not finish a reply."""
        weights = self._weights
        try:
            await replica.server.probe(replica.unread)
            self._check_replies(replica)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one, the others are looked at
            if replica.used and weights is self._weights:  # else it was taking weights meanwhile
                self._drop(replica, error)

    def _check_replies(self, replica: Replica) -> None:
        """Raise an error if a reply is overdue, and allow more time for the next one."""
        deadlines, in_flight = replica.server.deadlines, len(replica.in_flight)
        for sampling in replica.in_flight:
            seconds, limit = sampling.seconds, deadlines.reply(sampling.max_tokens, replica.unread, in_flight)
            if seconds > limit:
                deadlines.note_reply(seconds, sampling.max_tokens, sampling.unread, in_flight)
                raise Unusable(
                    f"it has not finished a reply of at most {sampling.max_tokens} tokens within {limit:.0f} s, though "
                    "its engine answers"
                )

    async def _next(self, keys: Sequence[int], failed: Collection[Replica]) -> Replica:
        """Return the server for a prompt, if possible none at which the request has failed."""
        while not (used := [replica for replica in self.replicas if replica.used]):
            self._some_used.clear()
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
                _warn(
                    f"no vLLM server is left ({self._reasons()}); waiting until one is back, for at most "
                    f"{self.wait_seconds:g} s ({KEY}.wait_seconds)"
                )
            try:
                async with asyncio.timeout(self._waiting_since + self.wait_seconds - time.monotonic()):
                    await self._some_used.wait()
            except TimeoutError:
                raise EngineGoneError(
                    f"there has been no vLLM server for {self.wait_seconds:g} s ({self._reasons()}); start one with "
                    f"`agentrl serve` at such an address, or raise {KEY}.wait_seconds"
                ) from None
        used = [replica for replica in used if replica not in failed] or used
        common = [common_blocks(keys, replica.read) for replica in used]
        return used[choose(len(keys), common, [len(replica.in_flight) for replica in used])]

    def _begin(self, replica: Replica, request: SamplingRequest, keys: Sequence[int]) -> Sampling:
        weights = self._weights
        assert weights is not None
        unread = len(request.prompt) - BLOCK * common_blocks(keys, replica.read)
        task = asyncio.create_task(self._generate(replica.server, request, weights))
        sampling = Sampling(task, request.max_tokens, unread, len(replica.in_flight) + 1)
        replica.in_flight.append(sampling)
        replica.read.update(keys)
        return sampling

    async def _generate(self, server: VLLMServer, request: SamplingRequest, weights: Weights) -> Reply:
        vocabulary = self.sizes["vocab_size"]
        return await server.generate(request, self.stop_token_ids, vocabulary, weights.version, weights.policy_version)

    async def _look_after(self, replica: Replica, faults: Sequence[Lost]) -> None:
        """Drop a server that is gone, unusable or lost its weights after a fault; else give it a moment."""
        if not replica.used:  # dropped meanwhile
            return
        weights = self._weights
        assert weights is not None
        why: Exception = Lost("it was restarted and has its initial weights")
        try:
            if isinstance(faults[-1], Unusable):
                raise faults[-1]
            await replica.server.probe(replica.unread)
            current = await replica.server.weight_version() == weights.version
        except (Lost, ValueError) as error:
            current, why = False, error if isinstance(error, Unusable) else faults[-1]
        if current:
            await asyncio.sleep(back_off(len(faults)))
        elif replica.used and weights is self._weights:
            self._drop(replica, why)

    async def _facts(self, replica: Replica) -> ServerFacts:
        """Return the facts of a server, or raise a ConfigError if it does not fit."""
        try:
            facts = await replica.server.facts()
        except ValueError as error:
            raise ConfigError(f"the server {replica.server.url} {error}") from error
        if why := complaint(facts, self.sizes, self.max_model_len, self.transfer):
            raise ConfigError(f"the server {replica.server.url} {why}")
        return facts

    async def _admit(self, replica: Replica) -> Exception | None:
        """Deliver the weights to a server and use it; else drop it and return why.

        That is Lost if it does not answer, and a ConfigError if it does not fit or refuses the weights.
        """
        async with replica.admitting:
            weights = self._weights
            if replica.used or weights is None:  # put into use meanwhile, and sampling; or an update will follow
                return None
            try:
                await self._facts(replica)
                if weights.delivery is not None:
                    await self._load(replica, weights.delivery, weights.version)
                    await self._agree(replica, weights)
                elif await replica.server.weight_version() != weights.version:
                    raise Lost("it does not have the current weights yet")
                if replica.why is not None:
                    await self._prove(replica.server, weights)
            except Exception as error:  # noqa: BLE001 - the others go on, and this one may be started again
                self._drop(replica, error)
                return error
            if weights is not self._weights:  # there are newer ones, whose delivery waits for the lock
                return None
            replica.read.clear()
            if replica.why is not None:
                rank_zero_info(f"the vLLM server {replica.server.url} is used again")
            replica.used, replica.why, self._waiting_since = True, None, None
            self._some_used.set()
            return None

    async def _load(self, replica: Replica, delivery: Delivery, version: str) -> None:
        try:
            await replica.server.load(delivery, version)
        except Unusable:
            raise
        except (Lost, ValueError) as error:
            if isinstance(error, Lost):
                await replica.server.probe()
            raise ConfigError(
                f"the server {replica.server.url} cannot take the weights of the policy: {error}; it must serve the "
                f"same model and {delivery.needs}"
            ) from error

    async def _prove(self, server: VLLMServer, weights: Weights) -> None:
        """Let a server that was dropped sample one token before it is used again."""
        one = SamplingRequest(ModelInput.of_ids((0,)), 1, 0.0, 0)
        limit = server.deadlines.reply(1, 1, 1)
        try:
            async with asyncio.timeout(limit):
                await self._generate(server, one, weights)
        except TimeoutError as error:
            raise Unusable(f"it has not sampled a token within {limit:.0f} s") from error
        except ValueError as error:
            raise ConfigError(f"the server {server.url} {error}") from error

    async def _agree(self, replica: Replica, weights: Weights) -> None:
        """Refuse a server whose weights have other bits than those of a server of equal layout. Only one says so."""
        if len(self.replicas) == 1:
            return
        assert weights.delivery is not None
        limit = replica.server.deadlines.load(weights.delivery.size)  # they are read once more
        try:
            async with asyncio.timeout(limit):
                layout, content = await replica.server.checksums()
        except TimeoutError as error:
            raise Unusable(f"it has not told the checksums of its weights within {limit:.0f} s") from error
        other, expected = weights.contents.setdefault(layout, (replica.server.url, content))
        if content != expected:
            raise ConfigError(
                f"the server {replica.server.url} holds other weights than {other} after the same update; one of them "
                "takes it over wrongly: start both again"
            )

    def _drop(self, replica: Replica, why: Exception) -> None:
        """Stop using a server, with one warning until it is used again or fails for another reason.

        Its requests go to the others.
        """
        before, replica.used, replica.why = replica.why, False, why
        for sampling in replica.in_flight:
            sampling.task.cancel()
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


def _warn(text: str) -> None:
    """Warn with the time, since Python shows equal warnings only once."""
    warnings.warn(f"{time.strftime('%H:%M:%S')} {text}", stacklevel=3)
