"""Text, images and histograms for those Lightning loggers that can show them; the others get numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger


def log_text(loggers: Sequence[Logger], name: str, text: str, step: int) -> None:
    """Log a text as it is, with its line breaks and in letters of one width."""
    quoted = text.replace("```", "'''")  # TensorBoard reads Markdown
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, f"```\n{quoted}\n```", step)
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, columns=["text"], data=[[text]], step=step)


def log_image(loggers: Sequence[Logger], name: str, image_HWC: np.ndarray, step: int) -> None:
    """Log a picture, uint8 [H, W, 3]."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, image_HWC, step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [image_HWC], step=step)


def log_histogram(loggers: Sequence[Logger], name: str, numbers: Sequence[float], step: int) -> None:
    """Log a histogram of the numbers that are finite; nothing if there are none."""
    numbers = [x for x in numbers if math.isfinite(x)]
    if not numbers:
        return
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, np.asarray(numbers, dtype=np.float64), step)
        elif isinstance(logger, WandbLogger):
            import wandb  # installed, since the logger needs it

            cast(Any, logger).log_metrics({name: wandb.Histogram(list(numbers))}, step=step)
