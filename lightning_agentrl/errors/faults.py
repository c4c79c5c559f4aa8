"""Errors that are typed where the fact is known. The command adds what it alone knows: key, file and line."""

from __future__ import annotations

import errno
import os


class EnvError(RuntimeError):
    """An environment raised, hung, ended its process, or broke its contract.

    The notes of the error name environment, episode, seed, turn and action.

    Args:
        kind: type name of what the environment raised, or ``timeout``, ``died``, ``contract``.
        message: one sentence.
        trace: the environment's own part of the traceback as text; empty where there is none.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


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
    """The disk is full, so a checkpoint could not be saved.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class EngineMismatchError(RuntimeError):
    """The engine does not sample from the policy that is trained; the message has the gap and its likely cause."""
