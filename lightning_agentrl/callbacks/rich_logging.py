"""Text, images and histograms for those Lightning loggers that can show them; the others get numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

LARGEST = 1e12  # in a histogram, where what is beyond counts as this much


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
    numbers = [min(max(x, -LARGEST), LARGEST) for x in numbers if math.isfinite(x)]
    if not numbers:
        return
    # TensorBoard's bins end at 1e20, and Weights & Biases parts the range of the numbers into 64: that between 0.3 and
    # 0.1 + 0.2 has no room for so many in float64, so they are to be one number.
    drawn = np.asarray(numbers, dtype=np.float32).astype(np.float64)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, drawn, step)
        elif isinstance(logger, WandbLogger):
            import wandb  # installed, since the logger needs it

            cast(Any, logger).log_metrics({name: wandb.Histogram(drawn.tolist())}, step=step)
