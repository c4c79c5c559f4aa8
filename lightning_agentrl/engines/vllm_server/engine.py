"""Sampling with vLLM servers: processes of their own, on this or other machines, reached over HTTP."""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_agentrl.distributed import all_gather, rank, world_size
from lightning_agentrl.engines.base import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.vllm.start import KEY, check_family, check_request
from lightning_agentrl.engines.vllm_server.background_loop import BackgroundLoop, in_thread
from lightning_agentrl.engines.vllm_server.pool import ServerPool, Weights
from lightning_agentrl.engines.vllm_server.sent_weights import SentWeights
from lightning_agentrl.engines.vllm_server.server import ServerFacts, VLLMServer, open_session
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.errors.vllm_version import check_installed
from lightning_agentrl.types.model_input import check_text_only
from lightning_agentrl.vllm_worker.extension import Transfer, sizes_of

if TYPE_CHECKING:
    import aiohttp  # slow, and imported with a server

THREAD = "vllm-servers"


class VLLMServerEngine(Engine):
    """Engine that samples with vLLM servers over HTTP. ``agentrl serve MODEL`` starts one; only it needs vLLM.

    Before each collection and validation the weights are written once into a folder that the servers read, or sent to
    each of them over the network; LoRA adapters are merged into them. Servers and replies report the version of the
    weights. An environment stays with its server, which has its past in the prefix cache; a new one goes to the server
    with the fewest requests in flight. A server that dies, hangs or gives unusable answers is dropped with a warning,
    and its requests go to the others. It is used again when it is back and has the current weights; with no server
    left, requests wait. All processes of a run share the servers.

    Args:
        urls: addresses of the servers, such as http://127.0.0.1:8001. Each run needs servers of its own. ``${NAME}``
            stands for an environment variable, so that records and logs do not hold a password.
        weights_folder: folder for weights that the servers see under the same path; by default a temporary folder, for
            servers on the trainer's machine.
        transfer: how weights get to the servers, which must be started with the same ``--transfer``: ``folder``;
            ``nccl``, over the network from GPU to GPU, which needs vLLM on the trainer's side too; ``gloo``, the same
            between main memories. Both keep a copy of the weights in the trainer's main memory.
        hang_seconds: seconds without an answer of its engine after which a server counts as hanging. A reply may take
            30 times as long, and an update of the weights 1 s more for each 10 MB. Raise it if a slow server is
            dropped.
        wait_seconds: most seconds that requests wait while no server is left; then the run ends.
    """

    own_weights: ClassVar[bool] = True

    def __init__(
        self,
        urls: list[str],
        weights_folder: str | None = None,
        transfer: Literal["folder", "nccl", "gloo"] = "folder",
        hang_seconds: float = 60.0,
        wait_seconds: float = 3600.0,
    ) -> None:
        check_secrets(urls, f"{KEY}.init_args.urls")
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls must be different addresses, at least one, got {urls}")
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"urls must be as http://127.0.0.1:8001, got {wrong[0]}")
        if weights_folder is not None and transfer != "folder":
            raise ValueError(f"weights_folder is for the transfer 'folder', got it with '{transfer}'; leave one out")
        self.weights_folder = weights_folder
        self.transfer: Transfer = transfer
        self.hang_seconds, self.wait_seconds = hang_seconds, wait_seconds
        self.policy_version = 0
        self.dtype = "auto"  # dtype of the servers, once known
        self._handle: PolicyHandle | None = None
        self._loop: BackgroundLoop | None = None
        self._pool: ServerPool | None = None
        self._weights: SharedWeights | SentWeights | None = None
        self._minding: asyncio.Task[None] | None = None
        self._run = ""  # prefix of all versions of weights, different for each run
        self._updates = 0

    def check(self) -> None:
        """Raise a ConfigError if no server answers or one does not fit; its model is checked at the start."""
        if self.transfer == "nccl":
            try:
                check_installed("the side of the trainer, with the transfer nccl,")
            except (ImportError, ValueError) as error:
                raise ConfigError(f"{error}; or set {KEY}.transfer to gloo or folder") from error
        in_thread(lambda: asyncio.run(self._look()), THREAD).result()  # the caller may be on a loop

    def start(self, handle: PolicyHandle) -> None:
        """Connect to the servers, or raise a ConfigError if none answers or one does not fit the policy."""
        if self._loop is not None:
            return
        (self._run, *_) = all_gather(uuid.uuid4().hex[:12])
        self._loop, self._handle, self._updates = BackgroundLoop(THREAD), handle, 0
        try:
            self._loop.run(self._open(handle))
            if rank() == 0:
                self._weights = self._way(handle)
        except BaseException:
            self.stop()
            raise

    def sync(self, policy_version: int) -> None:
        """Update the servers' weights, or raise a ConfigError if servers answer and none takes the weights."""
        loop, pool, handle = self._started()
        loop.run(pool.pause())
        self._updates += 1
        version, delivery = f"{self._run}-{self._updates}", None
        with _raised_on_all():
            with handle.gathered():
                if self._weights is not None:
                    delivery = self._weights.deliver(handle.policy.lm, version)
            if delivery is not None:
                loop.run(pool.update(Weights(version, policy_version, delivery)))
        with _raised_on_all():
            if self._weights is None:  # another rank has updated the servers
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
            if self._loop is not loop:  # and not cancelled by the caller
                raise RuntimeError("the engine was stopped") from None
            raise

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
        if self._weights is not None:
            self._weights.remove()
        self._handle = self._pool = self._weights = self._minding = None

    def _started(self) -> tuple[BackgroundLoop, ServerPool, PolicyHandle]:
        if self._loop is None or self._pool is None or self._handle is None:
            raise RuntimeError("the engine was not started")
        return self._loop, self._pool, self._handle

    def _way(self, handle: PolicyHandle) -> SharedWeights | SentWeights:
        if self.transfer == "folder":
            return SharedWeights(self.weights_folder)
        device = next(handle.policy.parameters()).device
        if self.transfer == "nccl" and device.type != "cuda":
            raise ConfigError(
                f"weights go by nccl from a GPU, and the policy is on the device '{device.type}'; change "
                f"trainer.accelerator, or set {KEY}.transfer to gloo or folder"
            )
        return SentWeights(self.transfer, device)

    # On the event loop of the servers

    async def _look(self) -> None:
        async with open_session(self.hang_seconds) as session:
            await ServerPool(self._servers(session), {}, 0, (), self.transfer).inspect()

    async def _open(self, handle: PolicyHandle) -> None:
        check_family(handle.policy.lm.config)
        sizes = sizes_of(handle.policy.lm.config.get_text_config())
        session = open_session(self.hang_seconds)
        pool = ServerPool(
            self._servers(session), sizes, handle.window, handle.stop_token_ids, self.transfer, self.wait_seconds
        )
        self._minding = asyncio.create_task(_mind(pool, session))  # closes the session at the end
        facts = await pool.inspect()
        self.dtype = next((server.dtype for server in facts if server.dtype != "float32"), "float32")
        check_precision(facts, handle)
        self._pool = pool

    def _servers(self, session: aiohttp.ClientSession) -> list[VLLMServer]:
        """Return the servers in an order that differs between ranks: each rank counts its own requests only."""
        first = rank() * len(self.urls) // world_size() % len(self.urls)
        return [VLLMServer(url, session, self.hang_seconds) for url in self.urls[first:] + self.urls[:first]]


@contextmanager
def _raised_on_all() -> Iterator[None]:
    """Raise a ConfigError of one rank on all of them, which would otherwise wait for it."""
    fault = None
    try:
        yield
    except ConfigError as error:
        fault = error
    if first := next(filter(None, all_gather(fault)), None):
        raise first


async def _mind(pool: ServerPool, session: aiohttp.ClientSession) -> None:
    """Look after the servers until the loop is stopped, which cancels this together with all requests."""
    async with session:
        await pool.mind()


def check_precision(facts: Sequence[ServerFacts], handle: PolicyHandle) -> None:
    """Warn of servers with another precision than the trainer's: they sample from a different distribution."""
    own = str(handle.computes_in).removeprefix("torch.")
    if rank() == 0 and (others := sorted({server.dtype for server in facts} - {own})):
        warnings.warn(
            f"a vLLM server computes in {others[0]} and the trainer in {own}, so what is sampled is not quite what is "
            f"trained; start it with `agentrl serve MODEL -- --dtype {own}`, or change trainer.precision",
            stacklevel=2,
        )
