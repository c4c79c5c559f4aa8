"""Wrong input in a sentence: what was given and where, what is known, which key to change.

Code that finds a fault raises a ValueError with a sentence, or :class:`ConfigError` with a :class:`Problem` in parts.
"""

from lightning_agentrl.errors.arguments import check_files
from lightning_agentrl.errors.complaints import explain, unknown_command
from lightning_agentrl.errors.ending import one_line_errors, show
from lightning_agentrl.errors.environments import environment_problem
from lightning_agentrl.errors.files import TOP_KEYS, check_yaml
from lightning_agentrl.errors.frames import from_package, raised_in
from lightning_agentrl.errors.problem import ConfigError, Place, Problem, one_line
from lightning_agentrl.errors.raised import constructor_error
from lightning_agentrl.errors.running import runtime_error
from lightning_agentrl.errors.sources import Sources
from lightning_agentrl.errors.words import OWN_PACKAGES, closest

__all__ = [
    "OWN_PACKAGES",
    "TOP_KEYS",
    "ConfigError",
    "Place",
    "Problem",
    "Sources",
    "check_files",
    "check_yaml",
    "closest",
    "constructor_error",
    "environment_problem",
    "explain",
    "from_package",
    "one_line",
    "one_line_errors",
    "raised_in",
    "runtime_error",
    "show",
    "unknown_command",
]
