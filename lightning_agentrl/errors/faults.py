"""Exception classes that the command recognizes, to add key, file and line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class EnvError(RuntimeError):
    """An environment raised an error, hung, ended its process, or broke its contract.

    The notes of the exception name environment, episode, seed, turn and action.

    Args:
        kind: name of the exception class that the environment raised, or ``timeout``, ``died``, ``reward`` or
            ``contract``.
        message: one sentence for the user.
        trace: part of the traceback inside the environment, as text; empty if there is none.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


class RunStoppedError(RuntimeError):
    """A run has stopped, since a value was not finite or a guard triggered.

    Args:
        reason: one sentence without the full stop.
        checkpoint: path of the last good checkpoint; None if there is none.
    """

    def __init__(self, reason: str, checkpoint: str | os.PathLike[str] | None) -> None:
        kept = f"the last good checkpoint is '{checkpoint}' (key ckpt_path)" if checkpoint else "there is no checkpoint"
        super().__init__(f"{reason}; {kept}")
        self.checkpoint = str(checkpoint or "")


class EngineGoneError(RuntimeError):
    """All servers of an engine were gone or hanging for longer than the run may wait."""


class CheckpointError(ValueError):
    """A run cannot be resumed from a checkpoint.

    Args:
        reason: rest of a sentence that begins with "the checkpoint".
        fix: advice for the user.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"the checkpoint {reason}" + (f"; {fix}" if fix else ""))
        self.reason = reason
        self.fix = fix


class CheckpointNotSavedError(OSError):
    """A checkpoint could not be saved, since the disk is full.

    Args:
        path: path of the checkpoint.
        before: path of the last good checkpoint; empty if there is none.
    """

    def __init__(self, path: str | os.PathLike[str], before: str = "") -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.before = before


class EngineMismatchError(RuntimeError):
    """The engine does not sample from the trained policy; the message has the log-prob mismatch and a likely cause."""


@contextmanager
def naming_file(path: os.PathLike[str]) -> Iterator[None]:
    """Add the file name to an OSError raised in the context; for a full disk, the system leaves the file name out."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
