"""Incremental reader of curves in TensorBoard's event files."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from lightning_agentrl.run_files import run_in

_BLOCK = 1 << 20
_HEAD = 1 << 16  # number of bytes at the start of a file that are searched for the run id
_RUN_ID = "run_id/text_summary"  # written by the callback RunRecord before the first iteration

Points = dict[float, float]  # values by step or iteration


@dataclass
class _Seen:
    """Contents of a file up to the offset that was read.

    Args:
        place: offset of the end of the last complete record.
        checksum: checksum of the bytes before this offset, to detect a changed file.
        points: points by the metric's name.
        restart: smallest step to which a restart in this file went back; points of earlier files after this step are
            invalid.
        run_id: id of the run that wrote the file; empty if unknown.
    """

    place: int = 0
    checksum: int = 0
    points: dict[str, Points] = field(default_factory=dict)
    restart: float = math.inf
    run_id: str = ""

    def add(self, event: Event) -> None:
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            self.restart = min(self.restart, event.step)
            drop_from(self.points, event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                self.points.setdefault(value.tag, {})[float(event.step)] = float(value.simple_value)
            elif value.tag == _RUN_ID and value.tensor.string_val:
                self.run_id = value.tensor.string_val[0].decode("utf-8", "replace")


_seen: dict[Path, _Seen] = {}  # cache of this process, since checking records takes 0.1 s per megabyte or more


def read_events(files: Iterable[Path]) -> tuple[dict[str, Points], list[str]]:
    """Return the scalars in the event files of a run by name, and the names of damaged files.

    A damaged file is read up to the damage. An incomplete last record does not count as damage, since the run may still
    be writing this record.
    """
    points: dict[str, Points] = {}
    damaged = []
    for path in sorted(files):
        try:
            with path.open("rb") as opened:
                seen = _seen.get(path)
                if seen is None or _checksum(opened, seen.place) != seen.checksum:
                    _seen[path] = seen = _Seen()
                whole = _read_on(opened, seen)
        except FileNotFoundError:  # the file was removed in the meantime
            continue
        damaged += [] if whole else [path.name]
        drop_from(points, seen.restart)
        for name, own in seen.points.items():
            points.setdefault(name, {}).update(own)
    return {name: own for name, own in points.items() if own}, damaged


def run_of_file(path: Path) -> str:
    """Return the id of the run that wrote a log or event file; empty if the file contains no id."""
    if ".tfevents." not in path.name:
        return run_in(path)
    seen = _Seen()
    with suppress(FileNotFoundError), path.open("rb") as opened:
        _read_on(io.BytesIO(opened.read(_HEAD)), seen)
    return seen.run_id


def drop_from(points: dict[str, Points], step: float) -> None:
    """Remove the points of this step and of later steps."""
    for name, own in points.items():
        if any(each >= step for each in own):
            points[name] = {each: y for each, y in own.items() if each < step}


def _read_on(opened: IO[bytes], seen: _Seen) -> bool:
    """Read further records of a file; return whether these records are undamaged."""
    opened.seek(seen.place)
    while len(head := opened.read(12)) == 12:
        length, checksum = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != checksum:
            return False
        body = opened.read(length + 4)
        if len(body) < length + 4:
            return True
        if struct.pack("<I", masked_crc32c(body[:-4])) != body[-4:]:
            return False
        try:
            event = Event.FromString(body[:-4])
        except DecodeError:
            return False
        seen.add(event)
        seen.place, seen.checksum = seen.place + len(head) + len(body), zlib.crc32(head + body, seen.checksum)
    return True


def _checksum(opened: IO[bytes], size: int) -> int:
    """Return a checksum of the first ``size`` bytes of a file, 100 times as fast as checking the records."""
    checksum = 0
    while size > 0 and (block := opened.read(min(size, _BLOCK))):
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum if not size else -1
