"""Wrong input in a sentence: what was given and where, what is known, which key to change.

Code that finds a fault raises a ValueError with a sentence, :class:`ConfigError` with a :class:`Problem` in parts, or a
class of its own (``faults.py``). The command adds file and line (``commands/places.py``) and ends with the sentence.
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
from lightning_agentrl.errors.foreign_messages import causes, explain
from lightning_agentrl.errors.names import OWN_PACKAGES, closest
from lightning_agentrl.errors.problem import ConfigError, Problem, first_line, in_one_line, one_line
from lightning_agentrl.errors.unknown import Usage, unknown_command

__all__ = [
    "OWN_PACKAGES",
    "CheckpointError",
    "CheckpointNotSavedError",
    "ConfigError",
    "EngineGoneError",
    "EngineMismatchError",
    "EnvError",
    "Problem",
    "RunStoppedError",
    "Usage",
    "causes",
    "closest",
    "explain",
    "first_line",
    "in_one_line",
    "naming_file",
    "one_line",
    "unknown_command",
]
