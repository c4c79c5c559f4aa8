"""The extension of vLLM's workers by `agentrl serve --transfer`: they receive weights over the network.

The transfer by NCCL is vLLM's own; gloo does the same without a GPU. Only vLLM's workers import this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lightning_agentrl.vllm_worker.extension import TellsSizes
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup, find_store, own_address


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where the trainer waits, and the size of its group."""

    master_address: str
    master_port: int
    world_size: int


@dataclass
class Announcement(WeightTransferUpdateInfo):
    """The tensors that follow, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[Meeting, Announcement]):
    """A receiver over gloo that loads weights layer by layer, as vLLM's engine for NCCL does."""

    init_info_cls = Meeting
    update_info_cls = Announcement
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        ranks = self.parallel_config
        rank = 1 + ranks.data_parallel_index * ranks.world_size + ranks.rank
        store = find_store(init_info.master_address, init_info.master_port)
        address = own_address(init_info.master_address)
        self._group = GlooGroup(store, rank, init_info.world_size, address)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Announcement) -> None:
        if self._group is None:
            raise RuntimeError("no trainer has formed a group with this server")
        try:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                self._group.broadcast(weight)
                self.model.load_weights([(name, weight)])
        except BaseException:
            self.shutdown()  # so that the trainer notices at once
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


class ReceivesWeights(TellsSizes):
    """A mixin of vLLM's worker that receives weights over the network."""

    def forget_trainer(self) -> None:
        """Leave the group with a trainer, and drop an unfinished update.

        vLLM would continue a half-finished update with the next one, and take a layer with one part twice for complete.
        The affected layers have undefined content until they are loaded again.
        """
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            finalize_layerwise_reload(engine.model, engine.model_config)
        engine.reset_weight_update_target()
        self._weight_update_active = False
        engine.shutdown()


WeightTransferEngineFactory.register_engine("gloo", GlooReceiver)
