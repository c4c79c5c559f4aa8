"""Errors that are typed where the fact is known. The command adds what it alone knows: key, file and line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class EnvError(RuntimeError):
    """An environment raised, hung, ended its process, or broke its contract.

    The notes of the error name environment, episode, seed, turn and action.

    Args:
        kind: type name of what the environment raised, or ``timeout``, ``died``, ``reward``, ``contract``.
        message: one sentence.
        trace: the environment's own part of the traceback as text; empty if there is none.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


class RunStoppedError(RuntimeError):
    """A run has ended itself, since its numbers are not sound or a guard said so.

    Args:
        reason: one sentence without its full stop.
        checkpoint: path of the last good one; None if there is none.
    """

    def __init__(self, reason: str, checkpoint: str | os.PathLike[str] | None) -> None:
        kept = f"the last good checkpoint is '{checkpoint}' (key ckpt_path)" if checkpoint else "there is no checkpoint"
        super().__init__(f"{reason}; {kept}")
        self.checkpoint = str(checkpoint or "")


class EngineGoneError(RuntimeError):
    """An engine whose servers were all gone or hanging for longer than the run may wait for them."""


class CheckpointError(ValueError):
    """A checkpoint cannot be continued from.

    Args:
        reason: the rest of a sentence that begins with "the checkpoint".
        fix: what to do.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"the checkpoint {reason}" + (f"; {fix}" if fix else ""))
        self.reason = reason
        self.fix = fix


class CheckpointNotSavedError(OSError):
    """A checkpoint could not be saved, since the disk is full.

    Args:
        path: of the checkpoint.
        before: path of the last good one; empty if there is none.
    """

    def __init__(self, path: str | os.PathLike[str], before: str = "") -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.before = before


class EngineMismatchError(RuntimeError):
    """The engine does not sample from the policy that is trained; the message has the gap and its likely cause."""


@contextmanager
def naming_file(path: os.PathLike[str]) -> Iterator[None]:
    """Let an error of writing to a file name it; of a full disk, the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
