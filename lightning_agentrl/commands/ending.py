"""End of a command: one sentence for an error that a user can fix, and the exit code."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_agentrl.errors import (
    CheckpointNotSavedError,
    ConfigError,
    EngineGoneError,
    EngineMismatchError,
    EnvError,
    Problem,
    RunStoppedError,
    causes,
    one_line,
)
from lightning_agentrl.errors.config_errors import Given
from lightning_agentrl.errors.foreign_messages import disk_full, out_of_memory

_NOISE = (
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning uses a deprecated function of torch
    r".*is not supported by the model summary.*",
    r".*does not have many workers.*",  # the stream is not a DataLoader
    r".*Checkpoint directory .* exists and is not empty.*",  # a folder may hold several runs
)
_TOKENS = "model.init_args.compute.max_tokens_per_micro_batch"
_BATCH = "the engine's batch (data.init_args.engine.init_args.max_batch)"
_LESS_MODEL = (
    "use a smaller model (model.init_args.model), LoRA (model.init_args.lora), SharedCritic (model.init_args.critic) "
    "or model.init_args.kl.reward 0, which keeps no copy of the initial policy"
)
_LESS_MEMORY = {  # advice by the stage that ran out of memory
    "load": _LESS_MODEL,
    "collect": f"lower {_BATCH}, data.init_args.num_envs or data.init_args.prompt.max_prompt_tokens",
    "score": f"lower {_TOKENS}",
    "update": f"lower {_TOKENS}, set model.init_args.compute.gradient_checkpointing to true, or {_LESS_MODEL}",
    "validate": f"lower {_BATCH} or data.init_args.validation.num_envs",
}
_ANY_STAGE = f"while collecting, {_LESS_MEMORY['collect']}; in training, {_LESS_MEMORY['update']}"


def leave_out_noise() -> None:
    """Hide warnings of libraries that a user cannot act on."""
    from transformers.utils import logging as transformers_logging  # slow to import

    transformers_logging.disable_progress_bar()
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", message=pattern)
    for module in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logger = logging.getLogger(f"lightning.pytorch.{module}")
        logger.addFilter(lambda record: not re.search("litlogger|litmodels|weights_only", record.getMessage()))


def end_quietly() -> None:
    """Discard standard error at exit if vLLM was used: vLLM's libraries write some 30 lines about leaked objects.

    nanobind has no option to turn these lines off from Python. Errors of the command are written earlier. Call this
    function before any other ``atexit.register``, so that it runs last.
    """

    def drop() -> None:
        if "vllm" in sys.modules:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    atexit.register(drop)


@contextmanager
def one_line_errors(arguments: Sequence[str] | None = None) -> Iterator[None]:
    """Exit with one sentence and code 2 on wrong input, 130 on Ctrl-C, 141 if the reader of the output is gone.

    Exit with code 1 after an error of an environment or the engine, and after a run that a guard stopped. Other errors
    keep their traceback.

    Args:
        arguments: arguments of the command, to find the file and line of a wrong key; None: the arguments of the
            process.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # flush here, since an error after this context could not be reported
    except KeyboardInterrupt as stop:
        _write(f"agentrl: {str(stop) or 'stopped'}")
        sys.exit(130)
    except Exception as error:
        if lost_reader(error):
            if notes := _notes(error):
                _write(f"agentrl: the reader of the output is gone; {'; '.join(notes)}")
            # Without a new stdout, Python reports an error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        wrong_input = error if isinstance(error, ConfigError) else explained(error)
        if wrong_input is not None:
            places = _places(wrong_input.problem, sys.argv[1:] if arguments is None else arguments)
            _write(f"agentrl: {wrong_input.problem.sentence(places, _notes(wrong_input))}")
            sys.exit(2)
        if not isinstance(error, EnvError | EngineGoneError | EngineMismatchError | RunStoppedError):
            raise
        trace = f"{error.trace.rstrip()}\n" if isinstance(error, EnvError) and error.trace else ""
        _write(f"{trace}agentrl: {error}" + "".join(f" ({note})" for note in _notes(error)))
        sys.exit(1)


def explained(error: BaseException, stage: str = "") -> ConfigError | None:
    """Return a ConfigError for an error that a user can fix; None for all other errors, which need a traceback.

    Args:
        error: error that ended the run; not a ConfigError.
        stage: stage of :class:`StageClock` that raised the error, or ``load``; empty if unknown.
    """
    if isinstance(error, EnvError):
        problem = Problem(str(error)) if error.kind == "contract" else None
    else:
        problem = next(filter(None, (_memory(cause, stage) or _disk(cause) for cause in causes(error))), None)
    if problem is None:
        return None
    config_error = ConfigError(problem)
    config_error.__cause__ = error
    return config_error


def lost_reader(error: BaseException) -> bool:
    """Return whether an error means that the reader of standard output has closed the pipe, for example `head`."""
    if not any(isinstance(cause, BrokenPipeError) for cause in causes(error)):
        return False
    try:
        polled = select.poll()
        polled.register(sys.stdout, 0)  # poll reports errors without a request
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in polled.poll(0))
    except (TypeError, ValueError, OSError):  # standard output has no file descriptor
        return False


def _memory(error: BaseException, stage: str) -> Problem | None:
    if not (device := out_of_memory(error)):
        return None
    what = f"out of memory on the {device}" + (f" in stage {stage}" if stage else "")
    first = one_line(str(error)).split(". ")[0]
    return Problem(f"{what}: {first}" if first else what, fix=_LESS_MEMORY.get(stage, _ANY_STAGE))


def _disk(error: BaseException) -> Problem | None:
    """Describe a file that cannot be written, since the disk is full or access to the folder is denied."""
    if not isinstance(error, OSError) or error.errno == errno.ENOENT:
        return None
    if isinstance(error, CheckpointNotSavedError):
        then = f"continue with --ckpt_path {error.before}" if error.before else "there is no checkpoint yet"
        fix = "free some space, choose another folder (trainer.default_root_dir), or keep fewer checkpoints "
        fix += f"(RunCheckpoints: every_n_epochs, keep); {then}"
        return Problem(f"the disk is full, cannot write '{error.filename}'", fix=fix)
    if disk_full(error):  # the error does not always name the file
        where = f", cannot write '{error.filename}'" if error.filename else ""
        fix = "free some space there, or choose another folder for the writer (the run, a logger, a callback)"
        return Problem(f"the disk is full{where}", fix=fix)
    fix = "choose another folder (trainer.default_root_dir, the logger's save_dir, ModelCheckpoint's dirpath)"
    return Problem(f"'{error.filename}' cannot be used: {error.strerror}", fix=fix) if error.filename else None


def _places(problem: Problem, arguments: Sequence[str]) -> list[str]:
    try:
        return Given(arguments).places(problem)
    except ConfigError:  # an unreadable config file is reported elsewhere
        return []


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error and its causes, each once."""
    return list(dict.fromkeys(note for cause in causes(error) for note in getattr(cause, "__notes__", ())))


def _write(text: str) -> None:
    """Write a text to standard error in one call, since several processes may write at the same time."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
