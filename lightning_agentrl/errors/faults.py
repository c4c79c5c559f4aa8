"""Errors that are typed where the fact is known. The command adds what it alone knows: key, file and line."""

from __future__ import annotations


class EnvError(RuntimeError):
    """An environment raised, hung, ended its process, or broke its contract.

    Which environment, episode, seed, turn and action it was stands in the notes of the error.

    Args:
        kind: type name of what the environment raised, or ``timeout``, ``died``, ``contract``.
        message: one sentence.
        trace: the environment's own part of the traceback as text; empty where there is none.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace
