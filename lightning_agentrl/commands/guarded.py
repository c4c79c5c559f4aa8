"""Context of a run in a command: stops engine and environments after an error, and turns the error into a sentence."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed import DistNetworkError, DistStoreError

from lightning_agentrl.agents.checkpoint import last_good_checkpoint
from lightning_agentrl.agents.checks import check_keys
from lightning_agentrl.agents.sharding import check_strategy
from lightning_agentrl.commands.ending import explained, lost_reader
from lightning_agentrl.errors import CheckpointError, ConfigError, Problem, causes, first_line, one_line
from lightning_agentrl.errors.config_errors import OWN_PACKAGES
from lightning_agentrl.rollout.stopping import Stopped

_NOT_A_USERS = {*OWN_PACKAGES, "lightning", "lightning_utilities", "torch", *sys.stdlib_module_names}
# gloo reports a lost process only as text.
_LOST = re.compile(
    r"gloo.*(?:(?P<closed>Connection (?:closed|reset) by peer|Broken pipe)|[Tt]imed out|timeout|No route|unreachable)"
    r"|Application timeout caused pair closure",
    re.DOTALL,
)
_PEER = re.compile(r"\[([\d.]+|[\da-fA-F:]+:[\da-fA-F:]+)\]:\d+")


@contextmanager
def guarded(cli: Any, stage: str) -> Iterator[None]:
    """Check strategy and keys before processes start. After an error, stop engine and environments.

    Args:
        cli: :class:`AgentCLI` that built agent, data module and trainer.
        stage: Lightning's name of the stage, ``fit`` or ``validate``.

    Raises:
        ConfigError: an error that a user can fix, such as any ValueError of this package before the first rollout.
    """
    try:
        check_strategy(cli.trainer, cli.model.lora is not None)
        if stage == "fit":
            check_keys(cli.trainer)  # check keys before the setup of callbacks, which may raise other errors
        yield
    except BaseException as error:
        playing = bool(cli.datamodule.sessions)
        # After Ctrl-C, Lightning has shut down and exits with 1.
        interrupted = isinstance(error.__context__, KeyboardInterrupt)
        with _ending(error, cli.signals.ends_at) if interrupted or isinstance(error, Stopped) else nullcontext():
            # `teardown` ends threads, since a thread inside torch at exit would abort the process.
            cli.datamodule.teardown(stage)
        path = last_good_checkpoint(cli.trainer)
        # Before the first rollout, Lightning's counts do not yet include the checkpoint's iterations.
        when = f"after iteration {cli.trainer.current_epoch}" if playing else "before its first rollout"
        then = f"continue with --ckpt_path {path}" if path else "there is no checkpoint yet"
        continues = f"stopped {when}; {then}" if cli.subcommand == "fit" else ""
        if interrupted:
            raise KeyboardInterrupt(continues) from None
        config_error = None if lost_reader(error) else _config_error(cli, error, playing)
        named = "ckpt_path" in str(config_error or error) or not isinstance(error, Exception)
        if continues and (lost_reader(error) or (playing and path and not named)):
            error.add_note(continues)
        if config_error:
            raise config_error from error
        raise


def _config_error(cli: Any, error: BaseException, playing: bool) -> ConfigError | None:
    """Return a ConfigError for an error that a user can fix; None for other errors, and for a ConfigError."""
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
    # An error of the user's code that misuses Lightning keeps its traceback.
    if ours or (lightnings and not set(packages) - _NOT_A_USERS):
        return ConfigError(one_line(str(error)))
    return None


def lost_process(error: BaseException, saved: bool) -> Problem | None:
    """Describe a failed rendezvous of the run's processes, or the loss of a process; None for other errors.

    Args:
        error: error that ended this process.
        saved: whether there is a checkpoint to continue from.
    """
    then = "continue with --ckpt_path last" if saved else "start again, as there is no checkpoint"
    for cause in causes(error):
        if isinstance(cause, DistStoreError | DistNetworkError):
            place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            what = f"the processes of this run did not meet at {place} ({one_line(first_line(cause))})"
            fix = "start the command on all nodes (trainer.num_nodes) with the address of the first node, whose port "
            return Problem(what, fix=f"{fix}they must be able to reach")
        if isinstance(cause, RuntimeError) and (lost := _LOST.search(str(cause))):
            address = _PEER.search(str(cause))
            who = "another process of this run" + (f" at {address[1]}" if address else "")
            if lost["closed"]:
                return Problem(f"{who} has ended", fix=f"its output has the reason; then {then}")
            fix = "check its machine and the network; if it hangs, its output shows where, and if it is slow, "
            fix += f"raise trainer.strategy.init_args.timeout; then {then}"
            return Problem(f"{who} did not answer in time", fix=fix)
    return None


@contextmanager
def _ending(error: BaseException, ends_at: float | None) -> Iterator[None]:
    """End the process at a second Ctrl-C or at the time limit, since teardown waits for running replies."""
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
