"""A checkpoint that cannot be continued from."""

from __future__ import annotations

import pickle
import re

from lightning_agentrl.errors.frames import from_package, local, passed
from lightning_agentrl.errors.problem import Problem, one_line

_RESTORING = (  # functions of Lightning
    *("_parse_ckpt_path", "load_checkpoint", "resume_start"),
    *("_restore_modules_and_callbacks", "restore_training_state"),
)
_NO_ADAM = re.compile(r"Missing optimizer state for parameter 'actor\.")
_SHAPES = re.compile(r"size mismatch for (\S+): .*?torch.Size\((\[[\d, ]*\])\).*?torch.Size\((\[[\d, ]*\])\)")


def of_another_model(error: BaseException, stage: str | None) -> Problem | None:
    """Weights or optimizer state that do not fit."""
    text = str(error)
    weights = isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict")
    optimizer = isinstance(error, ValueError) and from_package(error, "torch") and "loaded state dict" in text
    if not (weights or optimizer) or not passed(error, "lightning.", *_RESTORING):
        return None
    return Problem(
        f"{_given(error)} is of another model: {_differences(text) if weights else one_line(text)}",
        key="ckpt_path",
        fix="give model.init_args.model and model.init_args.critic as they were, or leave ckpt_path out",
    )


def inside_the_warm_up(error: BaseException, stage: str | None) -> Problem | None:
    """One process or DDP wrote it while the actor had no Adam state, which sharded optimizers do not take."""
    if not isinstance(error, RuntimeError) or not _NO_ADAM.match(str(error)):
        return None
    return Problem(
        f"{_given(error)} was written inside the critic warm-up by one process or DDP, where the actor has no Adam "
        "state yet, and ModelParallelStrategy needs that of all weights",
        key="ckpt_path",
        fix="continue it with trainer.strategy 'auto' or 'ddp' to the end of the warm-up, or leave ckpt_path out",
    )


def _differences(text: str) -> str:
    """How many weights differ, and one of each kind."""
    found = []
    for title, words in (("Missing", "it lacks"), ("Unexpected", "it has besides")):
        line = re.search(rf"{title} key\(s\) in state_dict: (.*)", text)
        if names := re.findall(r'"([^"]+)"', line[1]) if line else []:
            found.append(f"{words} {len(names)} weights such as {names[0]}")
    if shapes := _SHAPES.findall(text):
        name, there, here = shapes[0]
        found.append(f"{len(shapes)} weights have another shape, such as {name} {there} instead of {here}")
    return ", ".join(found) or one_line(text)[:200]


def unreadable(error: BaseException, stage: str | None) -> Problem | None:
    """Something else in place of a checkpoint."""
    reading = passed(error, "torch.serialization", "load") or isinstance(error, OSError)
    kinds = (OSError, RuntimeError, pickle.UnpicklingError, EOFError)
    if reading and isinstance(error, kinds) and passed(error, "lightning.", *_RESTORING):
        reason = error.strerror if isinstance(error, OSError) else "it was not saved by agentrl fit, or is damaged"
        return Problem(f"{_given(error)} cannot be read: {reason}", key="ckpt_path")
    if isinstance(error, KeyError) and passed(error, "lightning.", *_RESTORING):
        reason = f"lacks {error}: it was saved by another version, or not by agentrl fit"
        return Problem(f"{_given(error)} {reason}", key="ckpt_path")
    return None


def _given(error: BaseException) -> str:
    path = local(error, "ckpt_path", "checkpoint_path", "path_or_url", "_ckpt_path")
    return f"the checkpoint '{path}'" if path else "the checkpoint"
