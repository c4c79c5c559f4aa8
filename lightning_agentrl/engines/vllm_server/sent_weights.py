"""A copy of a policy's weights in main memory, sent to servers over the network, in one group per server.

NCCL sends by vLLM's own code, from GPU to GPU. Gloo does the same between main memories, for machines without a GPU.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.engines.vllm.kept_process import kept_process
from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.background_loop import in_thread
from lightning_agentrl.engines.vllm_server.server import Delivery, Lost, VLLMServer
from lightning_agentrl.engines.weights import named_as_in_files, named_weights, whole
from lightning_agentrl.vllm_worker.extension import FORGET_TRAINER, own_address
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup, open_store

T = TypeVar("T")

THREAD = "weights"
ANSWER_SECONDS = 5.0  # for a server to report why a transfer failed, or for this side to notice
LEAVE_SECONDS = 30.0  # to leave the groups at the end


class SentWeights:
    """Copies of weights, sent when a server needs them: during training, or after its restart.

    A group has fixed members. With one group per server, a server that dies or comes back affects no other.

    Args:
        transfer: how tensors are sent.
        device: device of the policy.
    """

    def __init__(self, transfer: Literal["nccl", "gloo"], device: torch.device) -> None:
        self._open: type[Sender] = NCCLSender if transfer == "nccl" else GlooSender
        self._device = device if transfer == "nccl" else torch.device("cpu")
        self._links: dict[str, _Link] = {}
        self._left: list[Future[Any]] = []  # threads of links that were broken off, which may still wait for a server

    def deliver(self, lm: PreTrainedModel, version: str) -> Delivery:
        """Copy all weights, with adapters merged, to be sent."""
        weights = copied_weights(lm)
        size = sum(weight.nbytes for weight in weights.values())

        async def bring(server: VLLMServer, before: str) -> None:
            link = self._links.pop(server.url, None)
            if link is not None and link.version != before:  # the server was restarted, or an update was aborted
                self._leave(link)
                link = None
            link = link or _Link(server, self._device, 2 * delivery.seconds(server.patience))
            try:
                await link.send(weights, version, self._open)
            except BaseException:
                self._leave(link)
                raise
            self._links[server.url] = link

        delivery = Delivery(f"reach the trainer over the network, on any port ({KEY}.transfer)", size, bring)
        return delivery  # which `bring` reads its time limit from

    def remove(self) -> None:
        """Leave all groups. A process that ends while a thread is still leaving one would crash."""
        for link in self._links.values():
            self._leave(link)
        wait(self._left, timeout=LEAVE_SECONDS)
        self._links.clear()

    def _leave(self, link: _Link) -> None:
        self._left = [thread for thread in self._left if not thread.done()] + link.close()


class _Link:
    """A group with one server, and the version last sent through it.

    Args:
        server: the server.
        device: device from which weights are sent.
        seconds: most seconds that one tensor may take; the update gives up before.
    """

    def __init__(self, server: VLLMServer, device: torch.device, seconds: float) -> None:
        self.version = ""
        self._seconds = seconds
        self._server, self._calls, self._source = server, Calls(server), WeightSource(device)
        self._sender: Sender | None = None
        self._working: Future[Any] | None = None

    async def send(self, weights: Mapping[str, Tensor], version: str, sender: type[Sender]) -> None:
        """Send weights, through a new group at first. If that fails, the link is to be closed."""
        if self._sender is None:
            await self._server.call_workers(FORGET_TRAINER)
            host = urlsplit(self._server.url).hostname
            rendezvous = Rendezvous(own_address(host or "127.0.0.1"), await self._server.workers(), self._seconds)
            self._sender = await self._watched(lambda: sender(rendezvous, self._calls, self._source))
        self._source.weights = weights
        await self._watched(self._sender.send_weights)
        self.version = version

    def close(self) -> list[Future[Any]]:
        """Start leaving the group, and return the threads: seconds with NCCL, during a transfer its time limit."""
        self._calls.cancel()
        leaving = [] if self._sender is None else [in_thread(self._sender.shutdown, THREAD)]
        return leaving + ([] if self._working is None else [self._working])

    async def _watched(self, work: Callable[[], T]) -> T:
        """Return the result of plain code. If the server refuses or dies, raise that while the code still waits."""
        self._working = in_thread(work, THREAD)
        working = asyncio.wrap_future(self._working)
        refusal = self._calls.refusal
        both: set[asyncio.Future[Any]] = {working, refusal}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() or working.exception() is not None:
                await asyncio.wait(both, timeout=ANSWER_SECONDS)
                fault = working.exception() if working.done() else None
                lost = Lost(f"the transfer of weights was aborted: {fault}")
                raise (refusal.result() if refusal.done() else lost) from fault
            return working.result()
        finally:
            working.cancel()


def copied_weights(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return weights by name in main memory, in pinned pages, with adapters merged.

    A weight with several names is copied once.
    """
    lm = whole(lm)
    weights, copies = dict[str, Tensor](), dict[object, Tensor]()
    for name, weight in named_as_in_files(lm, named_weights(lm)):
        place = (weight.data_ptr(), weight.shape, weight.stride())
        if place not in copies:
            copies[place] = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(weight)
        weights[name] = copies[place]
    return weights


# The arguments of vLLM's code for sending weights, in its own form: the weights, and a server to call


@dataclass(frozen=True)
class WeightForm:
    """A weight without its values: name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(eq=False)
class WeightSource:
    """Weights that are sent again and again, each time with other values; a ``WeightSource`` of vLLM."""

    device: torch.device  # from which they are sent
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def metadata(self) -> list[WeightForm]:
        return [WeightForm(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, weight.to(self.device)


class Calls:
    """The steps of a transfer on one server; vLLM calls it a ``VLLMWeightSyncClient``.

    To be made on the event loop of the server; steps run in other threads, which wait for the answer.
    """

    def __init__(self, server: VLLMServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.refusal: asyncio.Future[Exception] = self._loop.create_future()
        self._asked: set[Future[None]] = set()
        self._over = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._take("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._take("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._take("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing more: the version is set together with the drop of the prefix cache."""
        self._take("finish_weight_update", {})

    def cancel(self) -> None:
        """End the steps that wait for an answer, and the threads that wait for them. No more can be made."""
        self._over = True
        for asked in list(self._asked):
            asked.cancel()

    def _take(self, step: str, body: dict[str, Any]) -> None:
        asked = asyncio.run_coroutine_threadsafe(self._post(step, body), self._loop)
        self._asked.add(asked)
        if self._over:
            asked.cancel()
        try:
            asked.result()
        finally:
            self._asked.remove(asked)

    async def _post(self, step: str, body: dict[str, Any]) -> None:
        try:
            await self._server.post(f"/{step}", body)
        except Exception as error:
            if not self.refusal.done():
                self.refusal.set_result(error)
            raise


@dataclass(frozen=True)
class Rendezvous:
    """Where a new group meets, and its size."""

    address: str  # of the trainer, as seen from the server
    workers: int  # processes of the server that hold weights
    seconds: float  # most that one tensor may take; by NCCL, all of them


class GlooSender:
    """A sender over gloo: does what vLLM's own code does with NCCL, without vLLM.

    It joins the group with a server at once.

    Raises:
        Lost: the server is gone.
        ValueError: it refuses.
        RuntimeError: it did not join in time.
    """

    def __init__(self, rendezvous: Rendezvous, calls: Calls, source: WeightSource) -> None:
        self._calls, self._source = calls, source
        self._store = open_store(rendezvous.address)
        size = 1 + rendezvous.workers
        meeting = {"master_address": rendezvous.address, "master_port": self._store.port}
        meeting |= {"world_size": size, "rank_offset": 1}  # as vLLM's own sender gives it
        answered = in_thread(partial(calls.init_weight_transfer_engine, meeting), THREAD)
        self._group: GlooGroup | None = GlooGroup(
            self._store, 0, size, rendezvous.address, timedelta(seconds=rendezvous.seconds)
        )
        answered.result()

    def send_weights(self) -> None:
        """Send all weights of the source, with the steps around it; wait until the server has loaded them."""
        assert self._group is not None
        forms = self._source.metadata()
        announced = {
            "names": [form.name for form in forms],
            "dtype_names": [str(form.dtype).removeprefix("torch.") for form in forms],
            "shapes": [list(form.shape) for form in forms],
        }
        self._calls.start_weight_update()
        answered = in_thread(partial(self._calls.update_weights, announced), THREAD)  # the server waits for the tensors
        for _, weight in self._source:
            self._group.broadcast(weight)
        answered.result()
        self._calls.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group with the server."""
        self._group = None


class NCCLSender:
    """A sender over NCCL by vLLM's own code; needs vLLM on the trainer's side, and a GPU on both sides.

    vLLM sends on the current stream. That of the trainer would wait for a server that hangs, and the update with it;
    so this has one of its own. NCCL knows no time limit; after that of the rendezvous the group is aborted.

    Raises what :class:`GlooSender` does.
    """

    def __init__(self, rendezvous: Rendezvous, calls: Calls, source: WeightSource) -> None:
        with kept_process(source.device):
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
            from vllm.utils.network_utils import get_open_port

        self._calls, self._device, self._seconds = calls, source.device, rendezvous.seconds
        torch.cuda.set_device(self._device)  # of this thread
        self._stream = torch.cuda.Stream(self._device)
        meeting = NCCLTrainerInitInfo(
            master_address=rendezvous.address,
            master_port=get_open_port(),
            world_size=1 + rendezvous.workers,
            packed=False,  # packing buffers would take gigabytes of GPU memory
            rank=0,
        )
        with torch.cuda.stream(self._stream):
            self._sender = WeightTransferTrainerFactory.trainer_init(meeting, client=calls, source=source)

    def send_weights(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread too
        late, fault = threading.Event(), None

        def give_up() -> None:
            late.set()
            self._calls.cancel()  # else the sender would go on waiting for the server's answer
            self.shutdown()

        limit = threading.Timer(self._seconds, give_up)
        limit.daemon = True
        limit.start()
        try:
            with torch.cuda.stream(self._stream):
                self._sender.send_weights()
        except BaseException as error:
            if not late.is_set():
                raise
            fault = error
        finally:
            limit.cancel()
        if late.is_set():  # an aborted group sends nothing, and not always with an error
            raise RuntimeError(f"NCCL has not sent the weights within {self._seconds:.0f} s") from fault

    def shutdown(self) -> None:
        self._sender.shutdown()


Sender = GlooSender | NCCLSender
