"""The extension of vLLM's workers by `agentrl serve --transfer`: they receive weights over the network.

The transfer by NCCL is vLLM's own; gloo does the same without a GPU. Only vLLM's workers import this.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from lightning_agentrl.vllm_worker.extension import WorkerExtension, own_address
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup, find_store


class GlooReceiver(NCCLWeightTransferEngine):
    """vLLM's receiver over NCCL, with a group of gloo in its place: it is told the same, and loads alike."""

    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        ranks = self.parallel_config
        rank = init_info.rank_offset + ranks.data_parallel_index * ranks.world_size + ranks.rank
        store = find_store(init_info.master_address, init_info.master_port)
        self._group = GlooGroup(store, rank, init_info.world_size, own_address(init_info.master_address))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        assert self._group is not None
        try:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                self._group.broadcast(weight)
                self.model.load_weights([(name, weight)])
        except BaseException:
            self.shutdown()  # so that the trainer notices at once
            raise

    def shutdown(self) -> None:
        self._group = None


class ReceivesWeights(WorkerExtension):
    """The same extension of a worker that receives weights over the network."""

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
