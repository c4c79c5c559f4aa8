"""DeepSpeedStrategy without its demand for CUDA: ZeRO itself runs on CPUs."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class CPUZero(DeepSpeedStrategy):
    """ZeRO with gloo.

    Args:
        stage: of ZeRO.
    """

    def __init__(self, stage: int) -> None:
        super().__init__(stage=stage, process_group_backend="gloo")

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # leaves out the check for CUDA

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        deepspeed.ops.__compatible_ops__ = {}  # what it found would be compiled; gloo does without
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        engine, stepped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=-1),  # a CPU has no number
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, stepped


assert issubclass(DeepSpeedStrategy, DDPStrategy)  # whose environment is set up
