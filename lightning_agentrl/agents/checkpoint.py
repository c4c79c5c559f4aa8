"""Checkpoints on disk: written beside their name, checked when they are read, and found again."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_agentrl.agents.checkpoint_code import check_folder
from lightning_agentrl.agents.sharding import in_lockstep
from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError, one_line
from lightning_agentrl.errors.foreign_messages import disk_full, not_plain, out_of_memory
from lightning_agentrl.run_files import version_of
from lightning_agentrl.stalls import waiting_for

PART = ".part"  # ends the name of a checkpoint that is being written
LEFT_SECONDS = 3600.0  # after which a half-written checkpoint is a leftover and not one that another run writes
MANIFEST = "manifest.json"  # checksums of the files of a folder
METADATA = "meta.pt"  # everything but tensors, in a folder of ModelParallelStrategy
OF_ZERO = Path("checkpoint", "mp_rank_00_model_states.pt")  # everything but the optimizer, in a folder of DeepSpeed
NOT_OURS = "cannot be read: it was not saved by agentrl fit, or is damaged"
_PLAIN = "give plain types in the state_dict of your callbacks, and in what else code of yours adds to it"
_UNREADABLE = (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)
_IS_FOLDER = 0x10  # a flipped bit in an archive's directory with which torch leaves a tensor as it was allocated
# NotImplementedError and RuntimeError: a damaged entry claims to be compressed or encrypted.
_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError, RuntimeError)


# Saving and loading


class WholeFiles(TorchCheckpointIO):
    """Lightning's plugin for files: a name stands for a whole checkpoint, and reading one executes no code."""

    last_good = ""  # checkpoint saved or loaded last

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with waiting_for(f"the checkpoint {path} to be written"), _aside(Path(path), self.last_good) as part:
            torch.save(checkpoint, part)
            if foreign := get_unsafe_globals_in_checkpoint(part):
                what = f"it holds an object of {min(foreign)}; {_PLAIN}"
                rank_zero_warn(f"agentrl fit cannot continue from this checkpoint: {what}")
        self.last_good = str(path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if "://" in str(path):
            return super().load_checkpoint(path, weights_only=True)
        self.last_good = str(whole := whole_checkpoint(Path(path)))
        with _reading():
            checkpoint = torch.load(whole, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise CheckpointError(NOT_OURS)
        return checkpoint


class CheckpointedTrainer(L.Trainer):
    """Lightning's Trainer with safe folders: sharded strategies write and read these past Lightning's plugin."""

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        refuse_unsound_folder(ckpt_path)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: L.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: L.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        refuse_unsound_folder(ckpt_path)
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        if not in_lockstep(self.strategy) or "://" in str(filepath):
            super().save_checkpoint(filepath, weights_only, storage_options)
            return
        target = Path(self.strategy.broadcast(str(filepath))).absolute()
        first = _aside(target, last_good_checkpoint(self)) if self.is_global_zero else nullcontext(part_of(target))
        with waiting_for(f"the checkpoint {target} to be written"), first as part:
            self.strategy.barrier()
            super().save_checkpoint(part, weights_only, storage_options)
        self.strategy.barrier()


def guard_checkpoints(trainer: L.Trainer) -> None:
    """Let a trainer save whole checkpoints only, and remove what killed saves left.

    Raises:
        ValueError: the strategy saves folders, and the trainer is not one that writes and reads them safely.
    """
    strategy = trainer.strategy
    if in_lockstep(strategy) and not isinstance(trainer, CheckpointedTrainer):
        raise ValueError(
            f"{type(strategy).__name__} saves folders, which Lightning's own Trainer writes in place and reads without "
            "checks; use lightning_agentrl.Trainer (key trainer.strategy)"
        )
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = WholeFiles()
    if trainer.is_global_zero:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                clean(Path(callback.dirpath))


def last_good_checkpoint(trainer: L.Trainer) -> str:
    """Return the checkpoint that a run saved last, or else the one that it was continued from; empty if there is none.

    ``last_model_path`` of a callback would not do: Lightning sets it before it saves.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    saved = [callback._last_checkpoint_saved for callback in callbacks]
    saved.append(getattr(trainer.strategy.checkpoint_io, "last_good", ""))  # also by others than callbacks
    there = [path for path in saved if path and Path(path).exists()]
    return str(there[-1] if there else trainer.ckpt_path or "")


@contextmanager
def _aside(target: Path, before: str) -> Iterator[Path]:
    """Write a checkpoint beside its name, wait until it is on the disk, and rename it.

    Args:
        target: of the checkpoint.
        before: last good checkpoint, for the error.

    Raises:
        CheckpointNotSavedError: the disk is full; torch's own error names no file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(part := part_of(target))
    try:
        yield part
        for path in [*part.rglob("*"), part]:
            _sync(path)
        if part.is_dir():  # a manifest says that all else is on the disk
            write_manifest(part, _checksums(part, _names(part)))
            _sync(part / MANIFEST)
        _put_in_place(part, target)
    except BaseException as error:
        remove(part)  # a full disk is to have the space again
        faults = [fault for fault, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if any(map(disk_full, faults)):
            raise CheckpointNotSavedError(target, before=before) from error
        raise


def _put_in_place(part: Path, checkpoint: Path) -> None:
    """Rename a whole checkpoint. If this is killed between removing an old folder and that, :func:`clean` ends it."""
    if checkpoint.is_dir() or (part.is_dir() and checkpoint.exists()):
        remove(checkpoint)
    part.replace(checkpoint)
    _sync(checkpoint.parent)


def clean(folder: Path) -> None:
    """Rename whole checkpoints that killed saves left in a folder, and remove half-written ones."""
    for part in folder.glob(f"*.ckpt{PART}"):
        if (part / MANIFEST).is_file():
            _put_in_place(part, part.with_name(part.name.removesuffix(PART)))
        elif time.time() - part.stat().st_mtime > LEFT_SECONDS:
            remove(part)


def exists(checkpoint: Path) -> bool:
    """Return whether there is a checkpoint, or a whole one that has not got its name yet."""
    return checkpoint.exists() or (part_of(checkpoint) / MANIFEST).is_file()


def part_of(checkpoint: Path) -> Path:
    """Return where a checkpoint is written until it is whole."""
    return checkpoint.with_name(checkpoint.name + PART)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# Damage


def whole_checkpoint(given: Path) -> Path:
    """Return a checkpoint if it is whole; in place of a damaged one that a link names, return the one before it.

    A link such as ``last.ckpt`` stands for the newest checkpoint, any other name for this one only.

    Raises:
        CheckpointError: it cannot be read, or is damaged; names the newest one beside it that is whole.
    """
    with _reading():
        if not (reason := damage(given)):
            check_folder(given)
            return given
        damaged = given.resolve()
        beside = {path for folder in (damaged.parent, given.absolute().parent) for path in checkpoints_in(folder)}
        others = [path for path in in_order(beside) if path.resolve() != damaged]
        before = next((path for path in reversed(others) if not damage(path)), None)
    if before is None:
        raise CheckpointError(reason)
    if not given.is_symlink() or before.is_dir():
        raise CheckpointError(reason, f"the newest one beside it that is whole is '{before}'")
    rank_zero_warn(f"the checkpoint '{damaged}' {reason}; continuing from the one before it, '{before}'")
    return before


def refuse_unsound_folder(given: str | Path | None) -> None:
    """Refuse a folder that is damaged or holds code, before a strategy reads it.

    Raises:
        CheckpointError: see :func:`whole_checkpoint`.
    """
    if given is None or not exists(path := Path(given)):
        return
    first = cast(Any, rank_zero_only).rank == 0
    if first:
        clean(path.parent)
    if path.is_dir():
        with _reading():
            check_folder(path)
        if first:  # reads all of it
            whole_checkpoint(path)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or one_line(str(error))}") from error
    except _UNREADABLE as error:
        if out_of_memory(error):
            raise
        if kind := not_plain(error):
            raise CheckpointError(f"cannot be read: it holds an object of {kind}", _PLAIN) from error
        raise CheckpointError(NOT_OURS) from error


def damage(checkpoint: Path) -> str:
    """Return what is wrong with a checkpoint's files, as the rest of a sentence; empty if nothing.

    A file is compared with the checksums that torch writes into an archive, a folder with those in its manifest.

    Raises:
        OSError: it cannot be read.
    """
    if not checkpoint.is_dir():
        return _archive_damage(checkpoint)
    if not (checkpoint / MANIFEST).exists():  # saved by a script
        return next(filter(None, map(_archive_damage, checkpoint.rglob("*.pt"))), "")
    try:
        manifest: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text())
    except ValueError:
        return f"is damaged: {MANIFEST} cannot be read"
    if missing := sorted(manifest.keys() - set(_names(checkpoint))):
        return f"is damaged: {missing[0]} is missing"
    wrong = [name for name, crc in _checksums(checkpoint, manifest).items() if crc != manifest[name]]
    return f"is damaged: {wrong[0]} is not as it was written" if wrong else ""


def _archive_damage(file: Path) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            folders = (entry.filename for entry in archive.infolist() if entry.external_attr & _IS_FOLDER)
            wrong = archive.testzip() or next(folders, None)
    except _BAD_ARCHIVE:
        return NOT_OURS
    except OSError as error:
        if error.errno != errno.EINVAL:  # a position before the start of the file
            raise
        return NOT_OURS
    return f"is damaged: {wrong} is not as it was written" if wrong else ""


def checksum(file: Path, crc: int = 0) -> int:
    """Return the CRC-32 of a file, behind what has this CRC."""
    with file.open("rb") as opened:
        while chunk := opened.read(16 * 2**20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(lambda name: checksum(folder / name), names), strict=True))


def _names(folder: Path) -> list[str]:
    """Return the files of a folder by their paths in it."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != MANIFEST)


def write_manifest(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the checksums of all files of a folder."""
    (folder / MANIFEST).write_text(json.dumps(checksums, indent=1) + "\n")


# The newest


def newest_of(folders: Iterable[Path]) -> Path | None:
    """Return the newest checkpoint of several folders: of the run that wrote last, the one of the latest iteration.

    A logger makes a folder ``version_N`` at each start, so of folders that differ in N alone the last one counts.
    """
    found = {path: next((p for p in path.parents if version_of(p) >= 0), None) for path in map(newest, folders) if path}
    last: dict[Path, Path] = {}
    for version in sorted(filter(None, found.values()), key=version_of):
        last[version.parent] = version
    return next(reversed(in_order(path for path, own in found.items() if not own or last[own.parent] == own)), None)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, by its link if it has one.

    A link names what was saved last, also after a run went back to an earlier iteration. A callback that makes no link
    may have saved after that: then both iteration and time are later.
    """
    paths = sorted(folder.glob("*.ckpt"), key=Path.is_symlink)
    named = {path.resolve(): path for path in paths if is_complete(path)}
    ordered = in_order(named)
    linked = [path for path in ordered if named[path].is_symlink()]
    if linked:
        since = ordered[ordered.index(linked[-1]) :]
        ordered = [linked[-1], *(path for path in since if _age(path) > _age(linked[-1]))]
    return named[ordered[-1]] if ordered else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were written to their end, the oldest first; links are left out."""
    return in_order(path for path in folder.glob("*.ckpt") if not path.is_symlink() and is_complete(path))


def in_order(checkpoints: Iterable[Path]) -> list[Path]:
    """Return checkpoints the oldest first: by run, the one that wrote last at the end, then by iteration.

    Times of files, which copies lose, decide between runs only, and where the iteration is the same or not recorded.
    """
    by_age = sorted(checkpoints, key=_age)
    recorded = {path: _recorded(path) for path in by_age}
    last_of_run = {recorded[path][0]: _age(path) for path in by_age}
    return sorted(by_age, key=lambda path: (last_of_run[recorded[path][0]], recorded[path][1:], _age(path)))


def _recorded(checkpoint: Path) -> tuple[str, int, int, int]:
    """Return the run of a checkpoint, its iterations begun and completed, and its steps; -1 if it records none."""
    try:
        saved = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)
        counts = saved["loops"]["fit_loop"]["epoch_progress"]["current"]
        return str(saved["run_id"]), int(counts["ready"]), int(counts["completed"]), int(saved["global_step"])
    except (OSError, TypeError, LookupError, *_UNREADABLE):
        return "", -1, -1, -1


def main_file(checkpoint: Path) -> Path:
    """Return the file of a folder that holds all but tensors; the checkpoint itself if it is a file."""
    return next((inner for inner in (checkpoint / METADATA, checkpoint / OF_ZERO) if inner.is_file()), checkpoint)


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    if checkpoint.is_dir():
        return (checkpoint / MANIFEST).is_file()
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def _age(checkpoint: Path) -> tuple[int, str]:
    whole = checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint
    return whole.stat().st_mtime_ns, checkpoint.name
