"""Errors while a run goes on that its user can do something about."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lightning_agentrl.errors.checkpoints import inside_the_warm_up, of_another_model, unreadable
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.frames import (
    causes,
    environment_frames,
    from_package,
    local,
    passed,
    raised_in,
    stage_of,
)
from lightning_agentrl.errors.problem import ConfigError, Problem, one_line
from lightning_agentrl.errors.raised import missing_package
from lightning_agentrl.errors.words import closest, import_class, keys_of

_SESSION = "lightning_agentrl.episodes.session"
_TOKENS = "model.init_args.compute.max_tokens_per_micro_batch"
_BATCH = "the engine's batch (data.init_args.engine.init_args.max_batch)"
_LESS_MODEL = (
    "use a smaller model (model.init_args.model), LoRA (model.init_args.lora), SharedCritic (model.init_args.critic) "
    "or model.init_args.kl.reward 0, which keeps no copy of the initial policy"
)
_LESS_MEMORY = {
    "load": _LESS_MODEL,
    "collect": f"lower {_BATCH}, data.init_args.num_envs or data.init_args.prompt.max_prompt_tokens",
    "score": f"lower {_TOKENS}",
    "update": f"lower {_TOKENS}, set model.init_args.compute.gradient_checkpointing to true, or {_LESS_MODEL}",
    "validate": f"lower {_BATCH} or data.init_args.validation.num_envs",
}
_LESS_MEMORY_ANYWHERE = f"while playing, {_LESS_MEMORY['collect']}; in training, {_LESS_MEMORY['update']}"
_NO_MEMORY = re.compile(r"can't allocate memory|CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED")
_NO_METRIC = (
    re.compile(r"conditioned on metric `([^`]*)` which is not available.*following: (.*)", re.DOTALL),
    re.compile(r"monitor='([^']*)'\)`? could not find the monitored key in the returned metrics: \[(.*?)\]", re.DOTALL),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)


def runtime_error(error: BaseException, stage: str | None) -> ConfigError | None:
    """What to say about an error that a user can fix; None for all others, whose traceback is needed.

    Args:
        error: what ended the run.
        stage: what the run was doing, as :class:`StageClock` names it; None to read it from the traceback.
    """
    if isinstance(error, ConfigError):
        of_trainer = _of_trainer(error)
        return ConfigError(of_trainer) if of_trainer else error
    if isinstance(error, EnvError):
        return _with_cause(ConfigError(str(error)), error) if error.kind == "contract" else None
    if environment_frames(error):
        return None
    for cause in causes(error):
        for look in _LOOKS:
            if problem := look(cause, stage or stage_of(cause)):
                return _with_cause(ConfigError(problem), error)
    return None


def _with_cause(told: ConfigError, error: BaseException) -> ConfigError:
    told.__cause__ = error
    return told


def _out_of_memory(error: BaseException, stage: str | None) -> Problem | None:
    text = str(error)
    of_torch = type(error).__name__ == "OutOfMemoryError"  # by its name, since torch takes seconds to import
    told = isinstance(error, RuntimeError) and _NO_MEMORY.search(text)
    if not (of_torch or told or isinstance(error, MemoryError)):
        return None
    facts = []
    if tried := re.search(r"(?:[Tt]ried|Unable) to allocate (\d+(?:\.\d+)?)\.? (\w+)", text):
        facts.append(f"tried to allocate {_readable(tried[1], tried[2])}")
    if has := re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text):
        facts.append(f"{has[2]} of {has[1]} were free")
    place = "GPU" if of_torch or "CUDA" in text or "CUBLAS" in text else "CPU"
    what = f"out of memory on the {place}" + (f" in stage {stage}" if stage else "")
    return Problem(
        what + (f" ({', '.join(facts)})" if facts else ""), fix=_LESS_MEMORY.get(stage or "", _LESS_MEMORY_ANYWHERE)
    )


def _readable(number: str, unit: str) -> str:
    return f"{int(number) / 2**30:.1f} GiB" if unit.startswith("byte") else f"{number} {unit}"


def _disk_full(error: BaseException, stage: str | None) -> Problem | None:
    saving = passed(error, "lightning.", "save_checkpoint", "_save_checkpoint")
    full = isinstance(error, OSError) and error.errno in _DISK_FULL
    cut_short = saving and isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error)
    if not full and not cut_short:
        return None
    written = local(error, "filepath") if saving else ""  # the error itself may name a temporary file
    path = written or str(getattr(error, "filename", None) or local(error, "path"))
    fix = "free some space or choose another folder (trainer.default_root_dir)"
    if saving:
        fix += ", or keep fewer checkpoints: raise every_n_epochs or lower save_top_k of ModelCheckpoint"
    return Problem(f"the disk is full{_free_at(path)}" + (f", cannot write '{path}'" if path else ""), fix=fix)


def _free_at(path: str) -> str:
    folder = next((folder for folder in Path(path).absolute().parents if folder.is_dir()), None) if path else None
    return f" ({shutil.disk_usage(folder).free / 2**30:.1f} GiB free)" if folder else ""


def _no_access(error: BaseException, stage: str | None) -> Problem | None:
    if not isinstance(error, OSError) or error.errno not in _NO_ACCESS or not error.filename:
        return None
    return Problem(
        f"'{error.filename}' cannot be used: {error.strerror}",
        fix="choose another folder (trainer.default_root_dir, the logger's save_dir, ModelCheckpoint's dirpath)",
    )


def _unknown_metric(error: BaseException, stage: str | None) -> Problem | None:
    """A callback watches a metric that nothing logs."""
    match = next(filter(None, (pattern.search(str(error)) for pattern in _NO_METRIC)), None)
    if match is None or not from_package(error, "lightning"):
        return None
    known = re.findall(r"[`']([^`']+)[`']", match[2])
    return Problem(
        f"no metric '{match[1]}' is logged",
        key="trainer.callbacks.init_args.monitor",
        value=match[1],
        suggestion=closest(match[1], known),
        known=tuple(known),
    )


def _of_trainer(error: ConfigError) -> Problem | None:
    """A complaint of Lightning's Trainer, with the key where its text shows an argument and the value."""
    if not str(error).startswith("trainer: "):
        return None
    for cause in causes(error):
        if problem := _unknown_metric(cause, None):
            return problem
    known = keys_of(import_class("lightning.pytorch.Trainer"))
    given = [(name, value) for name, value in re.findall(r"(\w+)='?([\w.-]*)", str(error)) if name in known]
    return Problem(str(error), key=f"trainer.{given[0][0]}", value=given[0][1]) if given else None


def _bad_seed(error: BaseException, stage: str | None) -> Problem | None:
    if not isinstance(error, ValueError) or not passed(error, "lightning.", "seed_everything"):
        return None
    return Problem(f"seed_everything cannot be used: {one_line(str(error))}", key="seed_everything")


def _missing_package(error: BaseException, stage: str | None) -> Problem | None:
    if isinstance(error, ImportError) and from_package(error, "lightning", "transformers"):
        return missing_package(error, raised_in(error))
    return None


def _bad_answer(error: BaseException, stage: str | None) -> Problem | None:
    """An environment that answers in another form than gymnasium's."""
    taking = isinstance(error, ValueError | TypeError) and from_package(error, "lightning_agentrl", "gymnasium")
    if not taking or not passed(error, _SESSION, "_reset_env", "_step_env", "_see"):
        return None
    if " must " in str(error):  # the session has said it
        return Problem(str(error))
    return Problem(
        f"the environment's answer cannot be used ({error})",
        fix="reset gives (observation, info), step gives (observation, reward, terminated, truncated, info), with the "
        "observation as text and the reward as a number",
    )


_LOOKS: tuple[Callable[[BaseException, str | None], Problem | None], ...] = (
    _out_of_memory,
    _disk_full,
    of_another_model,
    inside_the_warm_up,
    unreadable,
    _no_access,
    _unknown_metric,
    _bad_seed,
    _missing_package,
    _bad_answer,
)
