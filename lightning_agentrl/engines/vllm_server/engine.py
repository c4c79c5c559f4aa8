"""Sampling with vLLM servers: separate processes on this or other machines, reached over HTTP."""

from __future__ import annotations

import asyncio
import threading
import uuid
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lightning_agentrl.distributed import all_gather, rank, world_size
from lightning_agentrl.engines.base import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY, check_family, check_request
from lightning_agentrl.engines.vllm_server.pool import ServerPool, Weights
from lightning_agentrl.engines.vllm_server.server import ServerFacts, VLLMServer, open_session
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.types.model_input import check_text_only
from lightning_agentrl.vllm_worker.extension import sizes_of

if TYPE_CHECKING:
    import aiohttp  # slow to import, and needed only with servers

T = TypeVar("T")


class BackgroundLoop:
    """Event loop in a daemon thread that runs coroutines until it is stopped."""

    def __init__(self) -> None:
        self._loop, self._stopped = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="vllm-servers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # The runner cancels the remaining tasks at its end.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopped.wait())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return a future for its result, which any thread can wait for."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine from synchronous code and return its result; an interrupt cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running coroutines and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()


class VLLMServerEngine(Engine):
    """Engine that samples with vLLM servers over HTTP. ``agentrl serve MODEL`` starts a server; only servers need vLLM.

    Before each collection and validation the weights are written once into a folder that the servers read; LoRA
    adapters are merged into the weights. Servers and replies report the version of the weights. All requests of an
    environment go to one server, whose prefix cache holds the environment's past; a new environment gets the server
    with the fewest requests in flight. A server that dies, hangs or gives unusable answers is dropped with a warning,
    and its requests go to the other servers. A dropped server is used again when it is back and has the current
    weights. While no server is left, requests wait. All processes of a run share the servers.

    Args:
        urls: addresses of the servers, such as http://127.0.0.1:8001. Two runs cannot share a server. ``${NAME}``
            stands for an environment variable, so that records and logs do not contain a password.
        weights_folder: folder for weights that the servers can read under the same path, for example on a shared file
            system; by default a temporary folder, for servers on the trainer's machine. ``/dev/shm`` is fastest.
        hang_seconds: seconds without an answer from a server's engine after which the server counts as hanging. A reply
            may take 30 times as long, and an update of the weights 1 s more per 10 MB. Raise ``hang_seconds`` if a slow
            server is dropped.
        wait_seconds: seconds that requests wait when no server is left, before the run ends.
    """

    own_weights: ClassVar[bool] = True

    def __init__(
        self,
        urls: list[str],
        weights_folder: str | None = None,
        hang_seconds: float = 60.0,
        wait_seconds: float = 3600.0,
    ) -> None:
        check_secrets(urls, f"{KEY}.init_args.urls")
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls must be different addresses, at least one, got {urls}")
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"urls must be as http://127.0.0.1:8001, got {wrong[0]}")
        self.weights_folder = weights_folder
        self.hang_seconds, self.wait_seconds = hang_seconds, wait_seconds
        self.policy_version = 0
        self.dtype = "auto"  # dtype of the servers after `start`
        self._handle: PolicyHandle | None = None
        self._loop: BackgroundLoop | None = None
        self._pool: ServerPool | None = None
        self._shared: SharedWeights | None = None  # set on rank 0, which writes the weights
        self._minding: asyncio.Task[None] | None = None
        self._run = ""  # prefix of the weight versions, different for each run
        self._updates = 0

    def check(self) -> None:
        """Check that a server answers and that all servers can be used; :meth:`start` checks their model.

        Raises:
            ConfigError: no server answers, or a server cannot be used.
        """
        loop = BackgroundLoop()  # the caller may already run on another event loop
        try:
            loop.run(self._inspect())
        finally:
            loop.stop()

    def start(self, handle: PolicyHandle) -> None:
        """Connect to the servers.

        Raises:
            ConfigError: no server answers, or a server does not fit the policy.
        """
        if self._loop is not None:
            return
        (self._run, *_) = all_gather(uuid.uuid4().hex[:12])
        self._loop, self._handle, self._updates = BackgroundLoop(), handle, 0
        try:
            self._loop.run(self._open(handle))
            if rank() == 0:
                self._shared = SharedWeights(self.weights_folder)
        except BaseException:
            self.stop()
            raise

    def sync(self, policy_version: int) -> None:
        """Update the servers' weights.

        Raises:
            ConfigError: servers answer, but none accepts the weights.
        """
        loop, pool, handle = self._started()
        loop.run(pool.pause())
        self._updates += 1
        version, folder = f"{self._run}-{self._updates}", None
        with _raised_on_all():
            with handle.gathered():
                if self._shared is not None:
                    folder = self._shared.write(handle.policy.lm, version)
            if folder is not None:
                loop.run(pool.update(Weights(version, policy_version, folder, _bytes_in(folder))))
        with _raised_on_all():
            if self._shared is None:  # another rank has updated the servers
                loop.run(pool.update(Weights(version, policy_version, None)))
        self.policy_version = policy_version

    async def generate(self, request: SamplingRequest) -> Reply:
        check_text_only([request.prompt], "VLLMServerEngine")
        loop, pool, _ = self._started()
        if not self._updates:
            raise RuntimeError("the engine has no weights yet; call sync first")
        check_request(request, pool.max_model_len, "the servers were asked for")
        reply = loop.submit(pool.ask(request))
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            if self._loop is not loop:  # the engine was stopped; the caller did not cancel the request
                raise RuntimeError("the engine was stopped") from None
            raise

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
        if self._shared is not None:
            self._shared.remove()
        self._handle = self._pool = self._shared = self._minding = None

    def _started(self) -> tuple[BackgroundLoop, ServerPool, PolicyHandle]:
        if self._loop is None or self._pool is None or self._handle is None:
            raise RuntimeError("the engine was not started")
        return self._loop, self._pool, self._handle

    # Methods that run on the background event loop

    async def _inspect(self) -> None:
        async with open_session(self.hang_seconds) as session:
            await ServerPool(self._servers(session), {}, 0, ()).inspect()

    async def _open(self, handle: PolicyHandle) -> None:
        check_family(handle.policy.lm.config)
        sizes = sizes_of(handle.policy.lm.config.get_text_config())
        session = open_session(self.hang_seconds)
        pool = ServerPool(self._servers(session), sizes, handle.window, handle.stop_token_ids, self.wait_seconds)
        self._minding = asyncio.create_task(_mind(pool, session))  # `_mind` closes the session at the end
        facts = await pool.inspect()
        self.dtype = next((server.dtype for server in facts if server.dtype != "float32"), "float32")
        check_precision(facts, handle)
        self._pool = pool

    def _servers(self, session: aiohttp.ClientSession) -> list[VLLMServer]:
        """Return the servers, in a different order on each rank, since a rank counts only its own requests."""
        first = rank() * len(self.urls) // world_size() % len(self.urls)
        return [VLLMServer(url, session, self.hang_seconds) for url in self.urls[first:] + self.urls[:first]]


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))


@contextmanager
def _raised_on_all() -> Iterator[None]:
    """Raise a ConfigError of one rank on all ranks, since the other ranks would wait for that rank."""
    fault = None
    try:
        yield
    except ConfigError as error:
        fault = error
    if first := next(filter(None, all_gather(fault)), None):
        raise first


async def _mind(pool: ServerPool, session: aiohttp.ClientSession) -> None:
    """Monitor the servers until the loop is stopped, and then close the session."""
    async with session:
        await pool.mind()


def check_precision(facts: Sequence[ServerFacts], handle: PolicyHandle) -> None:
    """Warn if a server's dtype differs from the trainer's, since the server's samples are then off-policy."""
    own = str(handle.computes_in).removeprefix("torch.")
    if rank() == 0 and (others := sorted({server.dtype for server in facts} - {own})):
        warnings.warn(
            f"a vLLM server computes in {others[0]} and the trainer in {own}, so what is sampled is not quite what is "
            f"trained; start it with `agentrl serve MODEL -- --dtype {own}`, or change trainer.precision",
            stacklevel=2,
        )
