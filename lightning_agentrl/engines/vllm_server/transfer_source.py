"""The arguments of vLLM's code for sending weights, in its own form: the weights, and a server to call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.engines.vllm_server.server import VLLMServer


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
        asked = asyncio.run_coroutine_threadsafe(self._tell(step, body), self._loop)
        self._asked.add(asked)
        if self._over:
            asked.cancel()
        try:
            asked.result()
        finally:
            self._asked.remove(asked)

    async def _tell(self, step: str, body: dict[str, Any]) -> None:
        try:
            await self._server.post(f"/{step}", body)
        except Exception as error:
            if not self.refusal.done():
                self.refusal.set_result(error)
            raise
