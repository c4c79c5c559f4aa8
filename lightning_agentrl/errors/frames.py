"""What a traceback tells: who raised an error, while doing what, and with which values."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from os import PathLike
from types import FrameType

_STAGES = {  # functions of ours, and what runs in them
    "configure_model": "load",
    "configure_optimizers": "load",
    "collect": "collect",
    "play_held_out": "validate",
    "prepare": "score",
    "score": "score",
    "training_step": "update",
}
_NOT_ASKING = ("prompt", "remember")  # these of a session call the memory, not the environment
_BETWEEN = ("gymnasium.", "concurrent.", "asyncio.", "contextlib")


def frames_of(error: BaseException) -> list[FrameType]:
    """Outermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    frames = frames_of(error)
    return module_of(frames[-1]) if frames else ""


def from_package(error: BaseException, *packages: str) -> bool:
    return raised_in(error).split(".")[0] in packages


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def passed(error: BaseException, package: str, *functions: str) -> bool:
    """Whether one of these functions of a package was running."""
    return any(frame.f_code.co_name in functions and module_of(frame).startswith(package) for frame in frames_of(error))


def local(error: BaseException, *names: str) -> str:
    """The innermost variable of one of these names that holds a path; empty if there is none."""
    for frame in reversed(frames_of(error)):
        for name in names:
            value = frame.f_locals.get(name)
            if value and isinstance(value, str | PathLike):
                return str(value)
    return ""


def stage_of(error: BaseException) -> str | None:
    """What the run was doing when an error came, None if that cannot be told."""
    own = [frame for frame in frames_of(error) if module_of(frame).startswith("lightning_agentrl.")]
    names = [frame.f_code.co_name for frame in reversed(own)]
    return next((_STAGES[name] for name in names if name in _STAGES), None)


def environment_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The part of a traceback that is in an environment; empty if it was not the environment that raised."""
    found = list(traceback.walk_tb(error.__traceback__))
    modules = [module_of(frame) for frame, _ in found]
    sessions = [index for index, name in enumerate(modules) if name == "lightning_agentrl.episodes.session"]
    if not sessions or found[sessions[-1]][0].f_code.co_name in _NOT_ASKING:
        return []
    inside = [pair for pair in found[sessions[-1] + 1 :] if not module_of(pair[0]).startswith(_BETWEEN)]
    own = [pair for pair in inside if module_of(pair[0]).startswith("lightning_agentrl.")]
    return [] if own else list(traceback.StackSummary.extract(iter(inside)))
