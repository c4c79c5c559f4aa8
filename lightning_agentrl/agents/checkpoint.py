"""Checkpoint files and folders: write them atomically, verify them when they are read, and find the newest."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_agentrl.agents.checkpoint_code import check_folder, read_metadata
from lightning_agentrl.agents.sharding import in_lockstep
from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError, one_line
from lightning_agentrl.errors.foreign_messages import disk_full, not_plain, out_of_memory
from lightning_agentrl.run_files import version_of
from lightning_agentrl.stalls import waiting_for

PART = ".part"  # suffix of a checkpoint that is being written
LEFT_SECONDS = 3600.0  # age from which a `.part` file is a leftover and not another run's unfinished save
MANIFEST = "manifest.json"  # checksums of the files in a folder
METADATA = "meta.pt"  # file for everything but tensors in a folder of ModelParallelStrategy
OF_ZERO = Path("checkpoint", "mp_rank_00_model_states.pt")  # DeepSpeed's file for everything but the optimizer's state
NOT_OURS = "cannot be read: it was not saved by agentrl fit, or is damaged"
_PLAIN = "use plain types in the state_dict of your callbacks, and in all else that your code adds to checkpoints"
_UNREADABLE = (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)
_IS_FOLDER = 0x10  # if damage sets this bit of an entry, torch silently leaves the entry's tensor uninitialized
# NotImplementedError and RuntimeError: a damaged entry claims to be compressed or encrypted.
# OSError: a damaged entry claims to start before the file.
_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError, OSError)


# Saving and loading


class WholeFiles(TorchCheckpointIO):
    """Checkpoint plugin for Lightning that writes files atomically and reads them without executing code."""

    last_good = ""  # path of the checkpoint saved or loaded last

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with waiting_for(f"the checkpoint {path} to be written"), written_whole(Path(path), self.last_good) as part:
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


def guard_checkpoints(trainer: L.Trainer) -> None:
    """Make a trainer write checkpoints atomically, and remove leftovers of interrupted saves.

    Raises:
        ValueError: the strategy saves folders, and the trainer does not write and read them safely.
    """
    strategy = trainer.strategy
    if in_lockstep(strategy) and type(trainer).save_checkpoint is L.Trainer.save_checkpoint:
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
    """Return the checkpoint that a run saved last, else the checkpoint that it resumed from, else an empty string.

    ``last_model_path`` of a callback is not reliable, since Lightning sets it before it saves.
    """
    return str(getattr(trainer.strategy.checkpoint_io, "last_good", "") or trainer.ckpt_path or "")


@contextmanager
def written_whole(target: Path, before: str) -> Iterator[Path]:
    """Provide a temporary path beside the target to write to; then sync the data to disk and rename the path.

    Args:
        target: path of the checkpoint.
        before: last good checkpoint, for the error message.

    Raises:
        CheckpointNotSavedError: the disk is full; torch's own error names no file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(part := part_of(target))
    try:
        yield part
        for path in [*part.rglob("*"), part]:
            _sync(path)
        if part.is_dir():  # the manifest is written last, so a folder with a manifest is complete
            write_manifest(part)
            _sync(part / MANIFEST)
        _put_in_place(part, target)
    except BaseException as error:
        remove(part)  # free the space on a full disk
        faults = [fault for fault, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if any(map(disk_full, faults)):
            raise CheckpointNotSavedError(target, before=before) from error
        raise


def _put_in_place(part: Path, checkpoint: Path) -> None:
    """Rename a complete checkpoint. If the process is killed before that, :func:`clean` renames it later."""
    if checkpoint.is_dir() or (part.is_dir() and checkpoint.exists()):
        remove(checkpoint)
    part.replace(checkpoint)
    _sync(checkpoint.parent)


def clean(folder: Path) -> None:
    """Rename complete checkpoints that interrupted saves left in a folder, and remove incomplete ones."""
    for part in folder.glob(f"*.ckpt{PART}"):
        if (part / MANIFEST).is_file():
            _put_in_place(part, part.with_name(part.name.removesuffix(PART)))
        elif time.time() - part.stat().st_mtime > LEFT_SECONDS:
            remove(part)


def exists(checkpoint: Path) -> bool:
    """Return whether a checkpoint exists, including a complete checkpoint that was not renamed yet."""
    return checkpoint.exists() or (part_of(checkpoint) / MANIFEST).is_file()


def part_of(checkpoint: Path) -> Path:
    """Return the temporary path of a checkpoint that is being written."""
    return checkpoint.with_name(checkpoint.name + PART)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it exists."""
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
    """Verify a checkpoint and return its path; for a link to a damaged file, return the previous checkpoint.

    A link such as ``last.ckpt`` means the newest checkpoint, so an older one may replace it; any other path means
    exactly that checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read or is damaged; the message names the newest undamaged checkpoint
            in the same folder.
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
        raise CheckpointError(reason, f"the newest undamaged one beside it is '{before}'")
    rank_zero_warn(f"the checkpoint '{damaged}' {reason}; continuing from the one before it, '{before}'")
    return before


def refuse_unsound_folder(given: str | Path | None) -> None:
    """Refuse a folder that is damaged or holds code, before a strategy reads it.

    Raises:
        CheckpointError: the folder is damaged, or has objects other than tensors and plain types.
    """
    if given is None or not exists(path := Path(given)):
        return
    first = cast(Any, rank_zero_only).rank == 0
    if first:
        clean(path.parent)
    if path.is_dir():
        with _reading():
            check_folder(path)
        if first:  # one rank only, since this check reads the whole folder
            whole_checkpoint(path)


@contextmanager
def _reading() -> Iterator[None]:
    """Convert errors of reading a checkpoint to a :class:`CheckpointError`."""
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
    """Return a description of damage to a checkpoint's files, as the predicate of a sentence; empty if undamaged.

    A file is compared with the checksums that torch writes into the archive, a folder with those in its manifest.

    Raises:
        OSError: the checkpoint cannot be read.
    """
    if not checkpoint.is_dir():
        return _archive_damage(checkpoint)
    if not (checkpoint / MANIFEST).exists():  # a script with another trainer saved this folder
        return next(filter(None, map(_archive_damage, checkpoint.rglob("*.pt"))), "")
    try:
        manifest: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text())
    except ValueError:
        return f"is damaged: {MANIFEST} cannot be read"
    found = _checksums(checkpoint)
    if missing := sorted(manifest.keys() - found.keys()):
        return f"is damaged: {missing[0]} is missing"
    wrong = [name for name in manifest if found[name] != manifest[name]]
    return f"is damaged: {wrong[0]} is not as it was written" if wrong else ""


def _archive_damage(file: Path) -> str:
    file.open("rb").close()  # raise an OSError if the file cannot be read
    try:
        with zipfile.ZipFile(file) as archive:
            folders = (entry.filename for entry in archive.infolist() if entry.external_attr & _IS_FOLDER)
            wrong = archive.testzip() or next(folders, None)
    except _BAD_ARCHIVE:
        return NOT_OURS
    return f"is damaged: {wrong} is not as it was written" if wrong else ""


def checksum(file: Path, crc: int = 0) -> int:
    """Return the CRC-32 of a file, continued from ``crc``, the checksum of preceding data."""
    with file.open("rb") as opened:
        while chunk := opened.read(16 * 2**20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _checksums(folder: Path) -> dict[str, int]:
    """Return the checksums of all files in a folder by relative path."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST]
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(lambda name: checksum(folder / name), names), strict=True))


def write_manifest(folder: Path) -> None:
    """Write the checksums of all files in a folder to its manifest."""
    (folder / MANIFEST).write_text(json.dumps(_checksums(folder), indent=1) + "\n")


# The newest


def newest_of(folders: Iterable[Path]) -> Path | None:
    """Return the newest checkpoint in several folders, as a link if there is a link to it.

    A link such as ``last.ckpt`` names the checkpoint that its run saved last, even after the run was resumed from an
    earlier iteration. Other callbacks may have saved later without a link; such a checkpoint is newer only if both its
    iteration and its file time are later. Of sibling folders ``version_N`` only the last is searched, since a logger
    creates such a folder at each start.
    """
    paths = [path for folder in folders for path in folder.glob("*.ckpt") if is_complete(path)]
    versions = {path: next((p for p in path.parents if version_of(p) >= 0), None) for path in paths}
    last = {version.parent: version for version in sorted(filter(None, versions.values()), key=version_of)}
    counted = [path for path, version in versions.items() if version is None or last[version.parent] == version]
    named = {path.resolve(): path for path in sorted(counted, key=Path.is_symlink)}
    ordered = in_order(named)
    if linked := [path for path in ordered if named[path].is_symlink()]:
        since = ordered[ordered.index(linked[-1]) :]
        ordered = [linked[-1], *(path for path in since if _age(path) > _age(linked[-1]))]
    return named[ordered[-1]] if ordered else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first, without links."""
    return in_order(path for path in folder.glob("*.ckpt") if not path.is_symlink() and is_complete(path))


def in_order(checkpoints: Iterable[Path]) -> list[Path]:
    """Sort checkpoints from oldest to newest: by run (the run that wrote last is at the end), then by iteration.

    Copying loses file times, so file times decide only between runs and between equal or unrecorded iterations.
    """
    by_age = sorted(checkpoints, key=_age)
    records = {path: recorded(path) for path in by_age}
    last_of_run = {records[path][0]: place for place, path in enumerate(by_age)}
    return sorted(by_age, key=lambda path: (last_of_run[records[path][0]], records[path][1:]))


def recorded(checkpoint: Path) -> tuple[str, int, int, int]:
    """Return a checkpoint's run id and counts of started iterations, completed iterations and steps; -1: unknown."""
    try:
        saved = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)
        counts = saved["loops"]["fit_loop"]["epoch_progress"]["current"]
        return str(saved["run_id"]), int(counts["ready"]), int(counts["completed"]), int(saved["global_step"])
    except (OSError, TypeError, LookupError, *_UNREADABLE):
        return "", -1, -1, -1


def main_file(checkpoint: Path) -> Path:
    """Return the file for everything but tensors in a checkpoint folder, or the checkpoint itself if it is a file."""
    return next((inner for inner in (checkpoint / METADATA, checkpoint / OF_ZERO) if inner.is_file()), checkpoint)


def read_weights(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the entries of a checkpoint, and its weights by name; for a folder, weights are on the meta device.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with _reading():
        entries = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)
        if not checkpoint.is_dir():
            return entries, entries["state_dict"]
        stored = read_metadata(checkpoint / ".metadata").state_dict_metadata
    weights = {name.removeprefix("state_dict."): one for name, one in stored.items() if name.startswith("state_dict.")}
    return entries, {
        name: torch.empty(one.size, device="meta")
        for name, one in weights.items()
        if isinstance(one, TensorStorageMetadata)
    }


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written completely."""
    if checkpoint.is_dir():
        return (checkpoint / MANIFEST).is_file()
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def _age(checkpoint: Path) -> tuple[int, str]:
    whole = checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint
    return whole.stat().st_mtime_ns, checkpoint.name
