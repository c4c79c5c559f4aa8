"""What all fits of the laboratory have in common: a trainer that says nothing, and games without a past."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers.utils import logging as transformers_logging

from lightning_agentrl.rollout import (
    EnvConfig,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)


def quiet() -> None:
    """Say nothing of each of some hundred fits; and one thread, since more are slower with models this small."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)


def quiet_trainer(folder: Path, epochs: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """On the CPU, without files and bars."""
    return L.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )


def data_of(
    env: EnvConfig, prompt: PromptFormat, interaction: TurnInteraction, seed: int, **settings: Any
) -> RolloutDataModule:
    """Return what plays a game: by default without past turns and held-out episodes.

    Args:
        env: the game.
        prompt: how it is told.
        interaction: how replies are read.
        seed: of levels and noise.
        settings: of the data module, such as what makes an iteration.
    """
    usual: dict[str, Any] = {"memory": WindowMemory(0), "validation": ValidationConfig(episodes=0)}
    return RolloutDataModule(env=env, prompt=prompt, interaction=interaction, seed=seed, **(usual | settings))
