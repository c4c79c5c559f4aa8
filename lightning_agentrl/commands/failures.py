"""What a user can do about an error that ended a run: memory, disk, folders, metrics."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from lightning_agentrl.errors import (
    CheckpointNotSavedError,
    ConfigError,
    EnvError,
    Problem,
    causes,
    first_line,
    one_line,
)
from lightning_agentrl.errors.foreign_messages import (
    disk_full,
    logger_refusal,
    lost_rank,
    not_met,
    out_of_memory,
    unknown_metric,
)

_TOKENS = "model.init_args.compute.max_tokens_per_micro_batch"
_BATCH = "the engine's batch (data.init_args.engine.init_args.max_batch)"
_LESS_MODEL = (
    "use a smaller model (model.init_args.model), LoRA (model.init_args.lora), SharedCritic (model.init_args.critic) "
    "or model.init_args.kl.reward 0, which keeps no copy of the initial policy"
)
_LESS_MEMORY = {  # by the stage in which it ran out
    "load": _LESS_MODEL,
    "collect": f"lower {_BATCH}, data.init_args.num_envs or data.init_args.prompt.max_prompt_tokens",
    "score": f"lower {_TOKENS}",
    "update": f"lower {_TOKENS}, set model.init_args.compute.gradient_checkpointing to true, or {_LESS_MODEL}",
    "validate": f"lower {_BATCH} or data.init_args.validation.num_envs",
}
_LESS_MEMORY_ANYWHERE = f"while collecting, {_LESS_MEMORY['collect']}; in training, {_LESS_MEMORY['update']}"
_WRITTEN = "where the run writes: in its folder, in those of its loggers and callbacks, or where its output goes"
_NO_ACCESS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
    errno.ELOOP,
    errno.EFBIG,  # also where `ulimit -f` allows no larger file
)


def explained(error: BaseException, stage: str = "") -> ConfigError | None:
    """Return a sentence for an error that a user can fix; None for all others, which need their traceback.

    Args:
        error: what ended the run, not a ConfigError.
        stage: where it was raised, a stage of :class:`StageClock` or ``load``; empty if that is not known.
    """
    if isinstance(error, EnvError):
        return _raised_from(error, Problem(str(error))) if error.kind == "contract" else None
    for cause in causes(error):
        if problem := _memory(cause, stage) or _disk(cause) or unknown_metric(cause) or logger_refusal(cause):
            return _raised_from(error, problem)
    return None


def lost_process(error: BaseException, saved: bool) -> Problem | None:
    """Describe processes that never met, or of which one was lost; None for other errors.

    Args:
        error: what ended this process.
        saved: whether there is a checkpoint to continue from.
    """
    for cause in causes(error):
        if not_met(cause):
            place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            return Problem(
                f"the processes of this run did not meet at {place} ({one_line(first_line(cause))})",
                fix="start the command on all nodes (trainer.num_nodes) with the address of the first, whose port they "
                "must reach",
            )
        if lost := lost_rank(cause):
            at = f" at {lost.address}" if lost.address else ""
            then = "continue with --ckpt_path last" if saved else "start again, as there is no checkpoint"
            if lost.closed:
                return Problem(
                    f"another process of this run{at} has ended", fix=f"its own output says why; then {then}"
                )
            return Problem(
                f"another process of this run{at} did not take part in time",
                fix="look at its machine, and at the network to it; if it hangs, its own output says where, and if it "
                f"is slow, raise trainer.strategy.init_args.timeout; then {then}",
            )
    return None


def file_fault(error: OSError) -> str:
    """Return a sentence for a file that a command other than a run's cannot read or write."""
    if disk_full(error):
        what = f", cannot write '{error.filename}'" if error.filename else ""
        return f"the disk is full{what}; free some space, or name another place to write to"
    return f"'{error.filename}' cannot be used: {error.strerror}" if error.filename else str(error)


def _raised_from(error: BaseException, problem: Problem) -> ConfigError:
    config_error = ConfigError(problem)
    config_error.__cause__ = error
    return config_error


def _memory(error: BaseException, stage: str) -> Problem | None:
    found = out_of_memory(error)
    if found is None:
        return None
    device, facts = found
    what = f"out of memory on the {device}" + (f" in stage {stage}" if stage else "") + (f" ({facts})" if facts else "")
    return Problem(what, fix=_LESS_MEMORY.get(stage, _LESS_MEMORY_ANYWHERE))


def _disk(error: BaseException) -> Problem | None:
    """Describe a file that cannot be written: the disk is full, or its folder may not be used."""
    if not isinstance(error, OSError):
        return None
    path = str(error.filename or "")
    saving, before = isinstance(error, CheckpointNotSavedError), ""
    if isinstance(error, CheckpointNotSavedError):
        before = f"; continue with --ckpt_path {error.before}" if error.before else "; there is no checkpoint yet"
    if disk_full(error) and not path:  # the system does not say which
        return Problem("the disk is full", fix=f"free some space {_WRITTEN}")
    if disk_full(error):
        fix = "free some space there, or give what writes there (the run, a logger, a callback) another folder"
        if saving:
            fewer = "or keep fewer checkpoints: raise every_n_epochs or lower keep of RunCheckpoints"
            fix = f"free some space or choose another folder (trainer.default_root_dir), {fewer}{before}"
        return Problem(f"the disk is full{_free(path)}, cannot write '{path}'", fix=fix)
    if saving:
        what = f"the disk did not keep the checkpoint '{path}': what is read back is not what was written"
        return Problem(what, fix=f"choose another folder (trainer.default_root_dir){before}")
    why = _lost_link(path) if error.errno in (errno.ENOENT, errno.EEXIST) else ""
    if path and (why or error.errno in _NO_ACCESS):
        fix = "choose another folder (trainer.default_root_dir, the logger's save_dir, ModelCheckpoint's dirpath)"
        return Problem(f"'{path}' cannot be used: {why or error.strerror}", fix=fix)
    return None


def _lost_link(path: str) -> str:
    """Return which link on the way to a file leads nowhere, such as to a disk that is not mounted; empty if none."""
    whole = Path(path).absolute()
    link = next((one for one in (whole, *whole.parents) if one.is_symlink() and not one.exists()), None)
    return f"'{link}' is a link to '{link.readlink()}', which is not there" if link else ""


def _free(path: str) -> str:
    whole = Path(path).absolute()
    folder = next((folder for folder in (whole, *whole.parents) if folder.is_dir()), None)
    return f" ({shutil.disk_usage(folder).free / 2**30:.1f} GiB free)" if folder else ""
