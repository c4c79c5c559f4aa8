"""Checkpoints on disk: put in place when they are whole, read back by their checksums, and found again.

torch writes the CRC-32 of every tensor, as it is in memory, into the directory of an archive, and does not read it
again. It is compared here once a checkpoint is written. Then everything is sealed with checksums of our own, which are
compared whenever it is read: a file with one in the comment that an archive may end with, a folder, to which every
process writes, with a manifest of its files.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents.checkpoint_code import read_metadata
from lightning_agentrl.run_files import version_of

LAST_SAVED = "last_saved"  # attribute of a strategy
PART = ".part"  # behind the name of a checkpoint that is being written
OLD = ".old"  # behind the name of a folder while another one takes its place
MANIFEST = "manifest.json"
_CHECKPOINT = ".ckpt"  # ends the name of a checkpoint
METADATA = "meta.pt"  # everything but tensors, in a folder that ModelParallelStrategy wrote
OF_ZERO = Path("checkpoint", "mp_rank_00_model_states.pt")  # in a folder of DeepSpeed: all but the optimizer
OTHER_MODEL = "give model.init_args.model and model.init_args.critic as they were, or leave ckpt_path out"
NOT_OURS = "cannot be read: it was not saved by agentrl fit, or is damaged"
_CHUNK = 16 * 2**20  # bytes
_SEAL = b"agentrl %08x"  # CRC-32 of the file before it
_SEAL_FORM = rb"agentrl ([0-9a-f]{8})"
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError),
    *(NotImplementedError, RuntimeError),  # a damaged entry that claims to be compressed, or encrypted
)


# Which there are


def last_good_checkpoint(trainer: L.Trainer) -> str:
    """Return the checkpoint that a run saved last, or else the one that it was continued from; empty if there is none.

    Both were read back, so this is quick. ``last_model_path`` would not do: Lightning sets it before it saves.
    """
    saved = [Path(callback._last_checkpoint_saved) for callback in _callbacks(trainer)]
    last: Path | None = getattr(trainer.strategy, LAST_SAVED, None)  # also by others than callbacks
    there = [path for path in (*saved, last) if path is not None and path.name and path.exists()]
    return str(there[-1] if there else trainer.ckpt_path or "")


def folders_of(trainer: L.Trainer) -> set[Path]:
    """Return the folders in which a run saves checkpoints, and that of the one which it was continued from."""
    own = {Path(c.dirpath) for c in _callbacks(trainer) if c.dirpath}
    return own | ({Path(trainer.ckpt_path).resolve().parent} if trainer.ckpt_path else set())


def _callbacks(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were written to their end, the oldest first; links are left out."""
    return in_order(path for path in folder.glob("*.ckpt") if not path.is_symlink() and is_complete(path))


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
        ordered = [linked[-1], *(path for path in since if age(path) > age(linked[-1]))]
    return named[ordered[-1]] if ordered else None


def newest_of(folders: Iterable[Path]) -> Path | None:
    """Return the newest checkpoint of several folders: of the run that wrote last, the one of the latest iteration.

    A logger makes a folder ``version_N`` at each start, so of folders that differ in N alone the last one counts.
    """
    found = {path: next((p for p in path.parents if version_of(p) >= 0), None) for path in map(newest, folders) if path}
    last: dict[Path, Path] = {}
    for version in sorted(filter(None, found.values()), key=version_of):
        last[version.parent] = version
    return next(reversed(in_order(path for path, own in found.items() if not own or last[own.parent] == own)), None)


def in_order(checkpoints: Iterable[Path]) -> list[Path]:
    """Return checkpoints the oldest first: by run, the one that wrote last at the end, then by iteration.

    Times of files, which copies lose, decide between runs only, and where the iteration is the same or not recorded.
    """
    by_age = sorted(checkpoints, key=age)
    recorded = {path: _recorded(path) for path in by_age}
    last_of_run = {recorded[path][0]: age(path) for path in by_age}
    return sorted(by_age, key=lambda path: (last_of_run[recorded[path][0]], recorded[path][1:], age(path)))


def _recorded(checkpoint: Path) -> tuple[str, int, int, int]:
    """Return the run of a checkpoint, its iterations begun and completed, and its steps; -1 if it records none."""
    try:
        saved = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)
        counts = saved["loops"]["fit_loop"]["epoch_progress"]["current"]
        return str(saved["run_id"]), int(counts["ready"]), int(counts["completed"]), int(saved["global_step"])
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, pickle.UnpicklingError):
        return "", -1, -1, -1


def main_file(checkpoint: Path) -> Path:
    """Return the file of a checkpoint that holds all but tensors, or all; the checkpoint itself if it is a file."""
    return next((inner for inner in (checkpoint / METADATA, checkpoint / OF_ZERO) if inner.is_file()), checkpoint)


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    if checkpoint.is_dir():
        return (checkpoint / MANIFEST).is_file()
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def age(checkpoint: Path) -> tuple[int, str]:
    """Return what orders checkpoints by the time at which they were written."""
    whole = checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint
    return whole.stat().st_mtime_ns, checkpoint.name


# Whether they are whole


def damage(checkpoint: Path, rank: int = 0, world: int = 1) -> str:
    """Return what is wrong with this rank's share of a checkpoint's files, as the rest of a sentence; empty if nothing.

    What a script has saved with torch has no seal; there, the checksums of tensors are compared.

    Raises:
        OSError: it cannot be read.
    """
    if not checkpoint.is_dir():
        return "" if rank else _file_damage(checkpoint)
    names = _names(checkpoint)
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return next(filter(None, (_archive_damage(checkpoint, name) for name in names[rank::world])), "")
    except ValueError:
        return f"is damaged: {MANIFEST} cannot be read"
    if missing := sorted(manifest.keys() - set(names)):
        return f"is damaged: {missing[0]} is missing"
    for name in names[rank::world]:
        if name in manifest and manifest[name] != checksum(checkpoint / name):
            return f"is damaged: {name} is not as it was written"
    return ""


def _file_damage(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - len(_SEAL % 0)))
        found = re.fullmatch(_SEAL_FORM, opened.read())
    if found is None:
        return _archive_damage(file, "")
    crc = checksum(file, without_end=len(_SEAL % 0))[1]
    return "" if crc == int(found[1], 16) else "is damaged: it is not as it was written"


def seal(part: Path, rank: int = 0, world: int = 1) -> dict[str, list[int]]:
    """Compare this rank's share of the files with the checksums that tensors had in memory, and seal it.

    Returns:
        Bytes and CRC-32 of each of these files of a folder, for its manifest.

    Raises:
        OSError: a file is not as it was in memory, or cannot be read.
    """
    names = _names(part)[rank::world]
    for name in names:
        if reason := _archive_damage(part, name):
            raise OSError(errno.EIO, reason, str(part / name))
    if part.is_dir():
        return {name: checksum(part / name) for name in names}
    if names:
        _seal_file(part)
    return {}


def _seal_file(file: Path) -> None:
    """Make the checksum of an archive its comment, whose length is in its last two bytes."""
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(len(_SEAL % 0).to_bytes(2, "little"))
    crc = checksum(file)[1]
    with file.open("ab") as opened:
        opened.write(_SEAL % crc)


def _names(checkpoint: Path) -> list[str]:
    """Return the files of a folder by their paths in it, and of a file an empty name."""
    if not checkpoint.is_dir():
        return [""]
    files = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in files if name != MANIFEST)


def _archive_damage(checkpoint: Path, name: str) -> str:
    """Compare the tensors in a file with the checksums in the directory of their archive, if the file is one."""
    file = checkpoint / name
    if file.suffix != ".distcp":
        return _directory_damage(file) if not name or file.suffix == ".pt" else ""
    pieces = read_metadata(checkpoint / ".metadata").storage_data.values()
    with file.open("rb") as opened:  # an archive for each tensor, one behind the other
        for piece in pieces:
            if piece.relative_path == name:
                opened.seek(piece.offset)
                if reason := _directory_damage(io.BytesIO(opened.read(piece.length))):
                    return reason
    return ""


def _directory_damage(file: Path | IO[bytes]) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    except _UNREADABLE:
        return NOT_OURS
    except OSError as error:
        if error.errno != errno.EINVAL:  # a position before the start of the file
            raise
        return NOT_OURS
    return f"is damaged: {wrong} is not as it was written" if wrong else ""


def checksum(file: Path, without_end: int = 0, crc: int = 0) -> list[int]:
    """Return bytes and CRC-32 of a file, without as many bytes at its end, behind what has this CRC."""
    left = size = file.stat().st_size - without_end
    with file.open("rb") as opened:
        while chunk := opened.read(min(left, _CHUNK)):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    return [size, crc]


# How they get there


def sync(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk; what is read next comes from there."""
    for inner in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _sync_one(inner)


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)


def write_manifest(part: Path, manifest: Mapping[str, Any]) -> None:
    """Write the checksums of all files of a folder."""
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def put_in_place(part: Path, checkpoint: Path) -> None:
    """Give a whole checkpoint its name; at any moment before that, the name is that of the one before.

    Folders cannot take each other's place at once. If this is killed in between, :func:`clean` puts the old one back.
    """
    old = _with_end(checkpoint, OLD)
    if checkpoint.exists() and (checkpoint.is_dir() or part.is_dir()):
        remove(old)
        checkpoint.rename(old)
    part.replace(checkpoint)
    _sync_one(checkpoint.parent)
    remove(old)


def part_of(checkpoint: Path) -> Path:
    """Return where a checkpoint is written until it is whole, in the same folder."""
    return _with_end(checkpoint, PART)


def exists(checkpoint: Path) -> bool:
    """Return whether there is a checkpoint, or the old one of a save that was killed."""
    return checkpoint.exists() or _with_end(checkpoint, OLD).exists()


def clean(folder: Path) -> None:
    """Remove what killed saves have left in a folder, unless another run is saving there just now.

    It may hold other things, such as halves of downloads or copies that somebody keeps; they are left alone.
    """
    if not folder.is_dir():
        return
    with suppress(BlockingIOError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for old in folder.glob(f"*{_CHECKPOINT}{OLD}"):
            checkpoint = old.with_name(old.name.removesuffix(OLD))
            if not any(path.is_dir() for path in (old, checkpoint, part_of(checkpoint))):
                continue  # only folders are put aside, or what a folder replaces
            if checkpoint.exists():
                remove(old)
            else:
                old.rename(checkpoint)
        for part in folder.glob(f"*{_CHECKPOINT}{PART}"):
            remove(part)


@contextmanager
def saving_in(folder: Path) -> Iterator[None]:
    """Keep others from cleaning a folder, until the block or the process ends."""
    with _locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, how)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks of folders
            pass
        yield
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _with_end(checkpoint: Path, end: str) -> Path:
    return checkpoint.with_name(checkpoint.name + end)
