"""Error messages for users, each one sentence: what was given and where, what is accepted, which key to change.

Code that finds a fault raises a ValueError with a sentence, a :class:`ConfigError` with a :class:`Problem`, or a class
from ``faults.py``. The command adds file and line (``config_errors.py``), prints the sentence and exits.
"""

from lightning_agentrl.errors.faults import (
    CheckpointError,
    CheckpointNotSavedError,
    EngineGoneError,
    EngineMismatchError,
    EnvError,
    RunStoppedError,
    naming_file,
)
from lightning_agentrl.errors.problem import ConfigError, Problem, causes, closest, first_line, one_line

__all__ = [
    "CheckpointError",
    "CheckpointNotSavedError",
    "ConfigError",
    "EngineGoneError",
    "EngineMismatchError",
    "EnvError",
    "Problem",
    "RunStoppedError",
    "causes",
    "closest",
    "first_line",
    "naming_file",
    "one_line",
]
