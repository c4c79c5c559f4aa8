"""A terminal without messages of libraries that a user of this one cannot act on."""

from __future__ import annotations

import logging
import warnings

from transformers.utils import logging as transformers_logging

_WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\).*",  # between lightning and torch
    r".*is not supported by the model summary.*",
    r".*does not have many workers.*",  # the stream is not a DataLoader
    r".*Checkpoint directory .* exists and is not empty.*",  # a second run in one folder is fine
)
_LOG_LINES = ("litlogger", "litmodels")


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _LOG_LINES)


def leave_out_noise() -> None:
    """Filter warnings and log lines for this process."""
    transformers_logging.disable_progress_bar()
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_NoNoise())
