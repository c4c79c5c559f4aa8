"""The folder in which a run keeps its files, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_agentrl.errors import naming_file


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of this run: that of the logger's files and checkpoints; without a logger the trainer's root.

    Every rank must call it, and gets the answer of the first.
    """
    logger = trainer.logger
    folder = Path(trainer.default_root_dir)
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        folder = Path(logger.log_dir)
    elif logger is not None:  # as ModelCheckpoint does
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = Path(logger.save_dir or folder) / str(logger.name) / version
    return Path(trainer.strategy.broadcast(str(folder)))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a place beside a file, which takes the file's place once it is written: nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with naming_file(beside):
        yield beside
    beside.replace(path)
