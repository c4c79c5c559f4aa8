"""What vLLM's code for sending weights is given, in its own form: the weights, and a server that it calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_agentrl.engines.vllm_server.server import VLLMServer


@dataclass(frozen=True)
class WeightForm:
    """A weight without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(eq=False)
class WeightSource:
    """Weights that are sent again and again, each time with other values; a ``WeightSource`` of vLLM."""

    device: torch.device  # that they are sent from
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def metadata(self) -> list[WeightForm]:
        return [WeightForm(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, weight.to(self.device)


class Calls:
    """The steps of a transfer on one server; vLLM calls it a ``VLLMWeightSyncClient``.

    Made on the event loop of the server; steps are taken in other threads, and wait there for the answer.
    """

    def __init__(self, server: VLLMServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.refused = asyncio.Event()
        self.why: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._take("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._take("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._take("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is set when prefixes are forgotten too."""
        self._take("finish_weight_update", {})

    def _take(self, step: str, told: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._tell(step, told), self._loop).result()

    async def _tell(self, step: str, told: dict[str, Any]) -> None:
        try:
            await self._server.transfer(step, told)
        except Exception as error:
            self.why = error
            self.refused.set()
            raise


class Sender(Protocol):
    """What vLLM calls a ``TrainerWeightTransferEngine``."""

    def send_weights(self) -> None:
        """All of the source, with the steps around it; waits until the server has loaded them."""

    def shutdown(self) -> None:
        """Leave the group with the server."""
