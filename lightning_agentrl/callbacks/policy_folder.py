"""The trained policy as a folder that transformers load."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.agents import Agent
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import ConfigError
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Make the folder at the start, since hours may pass before it is needed.

        Raises:
            ConfigError: nothing can be written there.
        """
        with raise_once():
            if stage == "fit" and trainer.is_global_zero:
                try:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                    TemporaryFile(dir=self.folder).close()
                except OSError as error:
                    raise ConfigError(
                        f"PolicyFolder cannot write to '{self.folder}': {error.strerror}; give another folder (key "
                        "trainer.callbacks)"
                    ) from error

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        with gathered(agent.actor):
            if trainer.is_global_zero:
                export_policy(agent.actor, agent.tokenizer, Path(self.folder))
        rank_zero_info(f"the policy is written to {self.folder}")
