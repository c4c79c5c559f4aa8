"""Pool of vLLM servers: sends each request to a server with the current weights, or waits for such a server."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.server import Lost, ServerFacts, Unusable, VLLMServer, complaint
from lightning_agentrl.errors import ConfigError, EngineGoneError
from lightning_agentrl.types.model_input import ModelInput

LOOK_SECONDS = 2.0  # time between two checks of a server
TRIES = 5  # attempts at a request that fails although a server answers


@dataclass(frozen=True)
class Weights:
    """The weights that all servers must have."""

    version: str
    policy_version: int
    folder: Path | None  # folder with the weights; None: another process sends the weights
    size: int = 0  # bytes
    contents: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """First server that loaded the weights, and its checksums, by layout of the weights."""


@dataclass(eq=False)
class Replica:
    """A server and its state."""

    server: VLLMServer
    used: bool = False  # whether the server answers, fits the policy and has the current weights
    in_flight: set[asyncio.Task[Reply]] = field(default_factory=set)
    why: Exception | None = None  # reason why the server is not used
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerPool:
    """Pool of servers. All methods run on one event loop.

    Args:
        servers: at least one server.
        sizes: sizes of the policy, see :func:`complaint`; empty to accept any model, for inspection only.
        max_model_len: largest number of tokens of a prompt and its reply.
        stop_token_ids: tokens that end a reply.
        wait_seconds: seconds that requests wait for a server before they fail.
    """

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        sizes: Mapping[str, Any],
        max_model_len: int,
        stop_token_ids: Sequence[int],
        wait_seconds: float = 0.0,
    ) -> None:
        self.replicas = [Replica(server) for server in servers]
        self.sizes = sizes
        self.max_model_len, self.stop_token_ids = max_model_len, stop_token_ids
        self.wait_seconds = wait_seconds
        self._weights: Weights | None = None  # None before the first update, and while an update is prepared
        self._homes = dict[int, Replica]()  # the server of each environment since the last update
        self._some_used = asyncio.Event()
        # Time when a request first found no server; None while there is a server.
        self._waiting_since: float | None = None

    async def inspect(self) -> list[ServerFacts]:
        """Return the facts of all servers that answer.

        Raises:
            ConfigError: no server answers, or a server does not fit; the message names the remedy.
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
        """Stop checking the servers until the next update, which this or another process sends."""
        self._weights = None

    async def update(self, weights: Weights) -> None:
        """Update the weights of the servers in use, or of all servers if none is in use.

        The other servers get the weights when they are back.

        Raises:
            ConfigError: a server answers, but no server accepts the weights.
        """
        asked = [replica for replica in self.replicas if replica.used] or self.replicas
        self._weights = weights
        self._homes.clear()  # no server has cached prompts with the new weights
        self._some_used.clear()
        for replica in self.replicas:
            replica.used = False
        faults = await asyncio.gather(*map(self._admit, asked))
        for fault in faults:
            if not (fault is None or isinstance(fault, Lost) or self._some_used.is_set()):
                raise fault

    async def ask(self, request: SamplingRequest) -> Reply:
        """Sample one reply; retry on another server if a server fails, and wait while there is no server.

        Raises:
            ConfigError: a server refuses the request.
            EngineGoneError: there was no server for ``wait_seconds``, or the request failed ``TRIES`` times.
        """
        faults, failed = 0, set[Replica]()
        while True:
            replica = await self._choose(request, failed)
            weights = self._weights
            assert weights is not None
            task = asyncio.create_task(self._generate(replica.server, request, weights))
            replica.in_flight.add(task)
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                replica.in_flight.remove(task)
            if task.cancelled():  # the server was dropped
                continue
            try:
                return task.result()
            except Lost as error:
                fault = error
            faults += 1
            failed.add(replica)
            if faults >= TRIES:
                raise EngineGoneError(
                    f"a reply has failed {TRIES} times, last on the server {replica.server.url} ({fault}); "
                    "look at its output"
                ) from fault
            if replica.used:
                await self._check(replica, fault)
            if replica.used:
                await asyncio.sleep(back_off(faults))

    async def mind(self) -> None:
        """Monitor the servers forever: drop servers that hang, and admit servers that are back."""
        await asyncio.gather(*map(self._mind, self.replicas))

    async def _mind(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._weights is None or replica.admitting.locked():  # admission has its own time limit
                continue
            await (self._check(replica) if replica.used else self._admit(replica))

    async def _check(self, replica: Replica, fault: Lost | None = None) -> None:
        """Drop a server that does not answer.

        Args:
            replica: server to check.
            fault: error of the server's last reply. A server with a fault is also dropped if its answer was unusable or
                its weights are outdated.
        """
        weights = self._weights
        why: Exception | None = None
        try:
            if isinstance(fault, Unusable):
                raise fault
            await replica.server.probe()
            if fault is not None and weights and await replica.server.weight_version() != weights.version:
                why = Lost("it was restarted and has its initial weights")
        except Exception as error:  # noqa: BLE001 - an error of one server must not stop the checks of other servers
            why = error if fault is None or isinstance(error, Unusable) else fault
        # Drop the server only if it was not updated or dropped meanwhile.
        if why is not None and replica.used and weights is self._weights:
            self._drop(replica, why)

    async def _choose(self, request: SamplingRequest, failed: Collection[Replica]) -> Replica:
        """Return the server for a request, preferably a server at which the request has not failed.

        All requests of an environment go to one server, whose prefix cache holds the environment's past. A new
        environment gets the server with the fewest requests in flight.
        """
        while not (used := [replica for replica in self.replicas if replica.used]):
            await self._wait_for_server()
        used = [replica for replica in used if replica not in failed] or used
        home = self._homes.get(request.number[0]) if request.number else None
        if home is None or home not in used:
            home = min(used, key=lambda replica: len(replica.in_flight))
            if request.number:
                self._homes[request.number[0]] = home
        return home

    async def _wait_for_server(self) -> None:
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

    async def _generate(self, server: VLLMServer, request: SamplingRequest, weights: Weights) -> Reply:
        expected = self.stop_token_ids, self.sizes["vocab_size"], weights.version, weights.policy_version
        try:
            return await server.generate(request, *expected)
        except ValueError as error:
            raise ConfigError(f"the server {server.url} {error}") from error

    async def _facts(self, replica: Replica) -> ServerFacts:
        """Return the facts of a server, or raise a ConfigError if the server does not fit the policy."""
        try:
            facts = await replica.server.facts()
        except ValueError as error:
            raise ConfigError(f"the server {replica.server.url} {error}") from error
        if why := complaint(facts, self.sizes, self.max_model_len):
            raise ConfigError(f"the server {replica.server.url} {why}")
        return facts

    async def _admit(self, replica: Replica) -> Exception | None:
        """Send the weights to a server and use it, or drop the server and return the reason.

        The reason is Lost if the server does not answer, and a ConfigError if the server does not fit or refuses the
        weights.
        """
        async with replica.admitting:
            weights = self._weights
            if replica.used or weights is None:  # the server is in use, or an update will follow
                return None
            try:
                await self._facts(replica)
                if weights.folder is not None:
                    await self._load(replica.server, weights.folder, weights)
                elif await replica.server.weight_version() != weights.version:
                    raise Lost("it does not have the current weights yet")
                if replica.why is not None:  # the server was dropped before, so first test it with one token
                    one = SamplingRequest(ModelInput.of_ids((0,)), 1, 0.0, 0)
                    async with replica.server.limit(replica.server.patience, "sampled a token"):
                        await self._generate(replica.server, one, weights)
            except Exception as error:  # noqa: BLE001 - the other servers continue; this server may be restarted
                self._drop(replica, error)
                return error
            if weights is not self._weights:  # newer weights are waiting for the lock
                return None
            if replica.why is not None:
                rank_zero_info(f"the vLLM server {replica.server.url} is used again")
            replica.used, replica.why, self._waiting_since = True, None, None
            self._some_used.set()
            return None

    async def _load(self, server: VLLMServer, folder: Path, weights: Weights) -> None:
        """Load the weights into a server, and compare checksums with other servers that have the same layout."""
        try:
            await server.load(folder, weights.size, weights.version)
        except Unusable:
            raise
        except (Lost, ValueError) as error:
            if isinstance(error, Lost):
                await server.probe()
            raise ConfigError(
                f"the server {server.url} cannot take the weights of the policy: {error}; it must serve the same model "
                f"and see the folder {folder} ({KEY}.weights_folder)"
            ) from error
        if len(self.replicas) == 1:
            return
        layout, content = await server.checksums(weights.size)
        other, expected = weights.contents.setdefault(layout, (server.url, content))
        if content != expected:
            raise ConfigError(
                f"the server {server.url} has other weights than {other} after the same update, so one of them has "
                "loaded it wrongly: restart both"
            )

    def _drop(self, replica: Replica, why: Exception) -> None:
        """Stop using a server and move its requests to the others.

        Warn once, until the server is used again or fails for another reason.
        """
        before, replica.used, replica.why = replica.why, False, why
        for task in replica.in_flight:
            task.cancel()
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
    """Return the seconds to wait before a retry: at most 2, and doubled with every fault."""
    return min(0.1 * 2**faults, 2.0)


def _warn(text: str) -> None:
    """Warn with the time, since Python shows equal warnings only once."""
    warnings.warn(f"{time.strftime('%H:%M:%S')} {text}", stacklevel=3)
