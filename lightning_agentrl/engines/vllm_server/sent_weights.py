"""A copy of a policy's weights in main memory, sent to servers, each of which is in a group with the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.answers import Lost
from lightning_agentrl.engines.vllm_server.background_loop import in_thread
from lightning_agentrl.engines.vllm_server.server import Delivery, VLLMServer
from lightning_agentrl.engines.vllm_server.transfer_source import Calls, WeightSource
from lightning_agentrl.engines.vllm_server.weight_senders import THREAD, GlooSender, NCCLSender, Rendezvous, Sender
from lightning_agentrl.engines.weights import named_as_in_files, named_weights, whole
from lightning_agentrl.vllm_worker.extension import FORGET_TRAINER, own_address

T = TypeVar("T")

SENDERS: dict[str, type[Sender]] = {"gloo": GlooSender, "nccl": NCCLSender}
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
        self._open = SENDERS[transfer]
        self._device = device if transfer == "nccl" else torch.device("cpu")
        self._links: dict[str, _Link] = {}
        self._left: list[Future[Any]] = []  # threads of links that were broken off, which may still wait for a server

    def deliver(self, lm: PreTrainedModel, version: str) -> Delivery:
        """Copy all weights, with adapters merged, to be sent."""
        weights = copied_weights(lm)
        size = sum(weight.nbytes for weight in weights.values())

        async def bring(server: VLLMServer, before: str) -> None:
            link = self._link(server, before, 2 * server.deadlines.load(size))  # threads give up later than who waits
            try:
                await link.send(weights, version, self._open)
            except BaseException:
                self._leave(link)
                raise
            self._links[server.url] = link

        return Delivery(f"reach the trainer over the network, on any port ({KEY}.transfer)", size, bring)

    def _link(self, server: VLLMServer, before: str, seconds: float) -> _Link:
        """Take the link with a server that has the version ``before``, or a new one."""
        link = self._links.pop(server.url, None)
        if link is not None and link.version != before:  # the server was restarted, or an update was aborted
            self._leave(link)
            link = None
        return link or _Link(server, self._device, seconds)

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
        seconds: most seconds that one tensor may take.
    """

    def __init__(self, server: VLLMServer, device: torch.device, seconds: float) -> None:
        self.version = ""
        self._server, self._calls, self._source = server, Calls(server), WeightSource(device)
        self._seconds = seconds
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
