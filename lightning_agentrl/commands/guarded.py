"""A run of the command: after an error, engine and environments are stopped, and the error gets its sentence."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_agentrl.agents.checkpoint import last_good_checkpoint
from lightning_agentrl.commands.ending import explained, lost_reader
from lightning_agentrl.commands.plan import PlanShown
from lightning_agentrl.errors import CheckpointError, ConfigError, Problem, causes, first_line, one_line
from lightning_agentrl.errors.config_errors import OWN_PACKAGES
from lightning_agentrl.errors.foreign_messages import lost_rank, not_met
from lightning_agentrl.rollout.stopping import Stopped

_NOT_A_USERS = {*OWN_PACKAGES, "lightning", "lightning_utilities", "torch", *sys.stdlib_module_names}


@contextmanager
def guarded(cli: Any, stage: str) -> Iterator[None]:
    """After an error, stop engine and environments so that no thread is left.

    Args:
        cli: the :class:`AgentCLI` that made agent, data module and trainer.
        stage: of Lightning.

    Raises:
        ConfigError: an error that a user can fix; before the first rollout every ValueError of ours is one.
    """
    try:
        yield
    except BaseException as error:
        playing = bool(cli.datamodule.sessions)
        interrupted = isinstance(error.__context__, KeyboardInterrupt)  # Lightning has shut down and exits with 1
        with _ending(error, cli.signals.ends_at) if interrupted or isinstance(error, Stopped) else nullcontext():
            cli.datamodule.teardown(stage)  # a thread inside torch would abort the process as it exits
        if isinstance(error, PlanShown):
            return
        continues = _stopped(cli.trainer, playing) if cli.subcommand == "fit" else ""
        if interrupted:
            raise KeyboardInterrupt(continues) from None
        if continues and lost_reader(error):
            error.add_note(continues)
            raise
        config_error = _config_error(cli, error, playing)
        named = "ckpt_path" in str(config_error or error) or not isinstance(error, Exception)
        if continues and playing and not named and last_good_checkpoint(cli.trainer):
            error.add_note(continues)
        if config_error:
            raise config_error from error
        raise


def _config_error(cli: Any, error: BaseException, playing: bool) -> ConfigError | None:
    """Return the sentence of an error that a user can fix; None for others, and for one that has a sentence."""
    if isinstance(error, ConfigError):
        return None
    if isinstance(error, CheckpointError):
        path = cli.trainer.ckpt_path or cli.start.get("ckpt_path")
        return ConfigError(Problem(f"the checkpoint '{path}' {error.reason}", key="ckpt_path", fix=error.fix))
    if problem := lost_process(error, bool(last_good_checkpoint(cli.trainer))):
        return ConfigError(problem)
    if found := explained(error, cli.model.clock.failed_in or ("" if playing else "load")):
        return found
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = takewhile(lambda name: name != "lightning.pytorch.trainer.trainer", reversed(modules))
    packages = [name.split(".")[0] for name in inside]
    package = packages[0] if packages else ""
    ours = package in OWN_PACKAGES and isinstance(error, ValueError | ImportError) and not playing
    lightnings = package == "lightning" and isinstance(error, MisconfigurationException | RuntimeError)
    # a user's own code that misuses Lightning needs its traceback
    if ours or (lightnings and not set(packages) - _NOT_A_USERS):
        return ConfigError(one_line(str(error)))
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


@contextmanager
def _ending(error: BaseException, ends_at: float | None) -> Iterator[None]:
    """End the process at the second Ctrl-C, and when its time is over, since teardown waits for running replies."""
    seconds = math.inf if ends_at is None else max(ends_at - time.monotonic(), 0.0)
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), os._exit, [getattr(error, "code", 130)])
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.cancel()


def _stopped(trainer: L.Trainer, playing: bool) -> str:
    path = last_good_checkpoint(trainer)
    then = f"continue with --ckpt_path {path}" if path else "there is no checkpoint yet"
    # until the run plays, Lightning's counts are not those of the checkpoint that it continues
    return f"stopped {f'after iteration {trainer.current_epoch}' if playing else 'before its first rollout'}; {then}"
