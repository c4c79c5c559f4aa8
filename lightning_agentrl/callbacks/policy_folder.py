"""The trained policy as a folder that transformers load."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.agents import Agent
from lightning_agentrl.models.export import export_policy
from lightning_agentrl.models.sharding import gathered


class PolicyFolder(L.Callback):
    """Writes the policy with its tokenizer at the end of training, as ``agentrl export`` does from a checkpoint.

    Adapters are merged into the model. The folder is what ``model.init_args.model`` of another run takes.

    Args:
        folder: to be made; files of an earlier export are overwritten.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        with gathered(agent.actor):
            if trainer.is_global_zero:
                export_policy(agent.actor, agent.tokenizer, Path(self.folder))
        rank_zero_info(f"the policy is written to {self.folder}")
