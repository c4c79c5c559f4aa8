"""Saving and ending of a run at a signal."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_agentrl.agents.checkpoint import last_good_checkpoint, remove
from lightning_agentrl.callbacks.run_checkpoints import RunCheckpoints, name_last
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.distributed import rank
from lightning_agentrl.rollout.stopping import Stopped, Stopping

# Pattern of file names that Lightning searches in a requeued job, and number of such files to keep.
SLURM_SAVED, SLURM_KEPT = "hpc_ckpt_*.ckpt", 2
LOOK_SECONDS = 0.5  # interval at which the thread checks the deadline, and requests that are not signals
SECOND_AFTER = 1.0  # seconds within which a signal is a duplicate: `timeout` signals the process and its process group


class StopOnSignals(L.Callback):
    """Save and end the run at SIGTERM, Ctrl-C or when the terminal is closed.

    A running collection, scoring or validation is abandoned, and repeated when the run is resumed; an update is
    finished. Then the run saves ``stopped-<iterations>.ckpt`` beside its other checkpoints. Its exit code is 143 after
    SIGTERM, 130 after Ctrl-C, and 129 after SIGHUP, which a closing terminal sends (except to runs under ``nohup``). A
    run whose engine has had no server for too long ends in the same way, with exit code 143. A second signal ends the
    run at once. SIGUSR1 saves ``saved-<iterations>.ckpt`` after the current stage, and the run continues.

    A process passes its signals on to the processes that it started. If only another process receives a signal, the
    others react at the next synchronization: after a collection, scoring, validation or update.

    Under SLURM, SIGUSR1 (``sbatch --signal=SIGUSR1@90``) also ends the run, and ``scontrol`` requeues the job, in which
    the same command resumes from the saved checkpoint.

    ``agentrl`` and ``lightning_agentrl.Trainer`` have this callback with its defaults. With Lightning's own Trainer,
    put it first in the list of callbacks. ``fit`` raises ``SystemExit`` after saving.

    Args:
        grace_seconds: seconds from the first signal after which the process ends even if it could not save. A message
            names the last checkpoint in any case.
    """

    def __init__(self, grace_seconds: float = 30.0) -> None:
        self.grace_seconds = grace_seconds
        self.command: Sequence[str] = ()  # command line of this run, for the message on how to resume
        self.ends_at: float | None = None  # deadline on the monotonic clock, after a request to end
        self._came_at: float | None = None  # time of the first signal
        self._requeues_on = 0  # signal after which the SLURM job is requeued; 0: none
        self._earlier: dict[int, Any] = {}  # previous handlers of the signals that are handled
        self._thread: threading.Thread | None = None

    # Lightning installs its own handlers after on_fit_start.

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._begin(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and end if a signal arrived in the last update, before other callbacks use the trained weights."""
        _stopping(trainer).agree()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            if isinstance(exception, Stopped):
                self._end(trainer, exception)
        finally:
            self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    # Python runs a handler only when the main thread is free, but this thread may wait inside torch for minutes. The
    # interpreter writes the number of a signal to a pipe at once, so another thread reads the number from the pipe.

    def _begin(self, trainer: L.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("signals are not handled, since fit runs outside the main thread")
            return
        _stopping(trainer).begin(lambda: _say(f"SIGUSR1 received: {self._save(trainer, 'saved')}"))
        self._requeues_on = _requeue_signal(trainer)
        self.ends_at = self._came_at = None
        self._over = threading.Event()
        self._pipe, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        handled = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, self._requeues_on} - {0}
        # Do not handle signals that the process ignores from its start, such as Ctrl-C in the background of a script.
        handled = {number for number in handled if signal.getsignal(number) is not signal.SIG_IGN}
        self._earlier = {number: signal.signal(number, _in_the_pipe) for number in handled}
        self._thread = threading.Thread(target=self._listen, args=(trainer,), name="signals", daemon=True)
        self._thread.start()

    def _close(self) -> None:
        """End the thread and restore the earlier handlers, unless Lightning or other code has set new ones."""
        if self._thread is None:
            return
        for number, handler in self._earlier.items():
            if signal.getsignal(number) is _in_the_pipe:
                # None is a handler that was not set from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._earlier_pipe)
        self._over.set()
        os.write(self._written, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._written)
        os.close(self._pipe)

    def _listen(self, trainer: L.Trainer) -> None:
        stopping, limit = _stopping(trainer), f"{self.grace_seconds:g} s"
        while not self._over.is_set():
            readable, _, _ = select.select([self._pipe], [], [], LOOK_SECONDS)
            for number in os.read(self._pipe, 4096) if readable else b"":
                if number in self._earlier:
                    self._came(trainer, number)
            if stopping.asked and self.ends_at is None:
                self.ends_at = time.monotonic() + self.grace_seconds
                then = f"the run saves and ends within {limit}; a second signal ends it at once"
                _say_at_once(f"{_why(stopping, stopping.asked)}: {then}")
            if self.ends_at is not None and time.monotonic() > self.ends_at:
                self._end_at_once(trainer, f"and it could not save within {limit}")

    def _came(self, trainer: L.Trainer, number: int) -> None:
        stopping, launcher = _stopping(trainer), trainer.strategy.launcher
        if launcher is not None:  # pass the signal on to the processes that this process started
            launcher.kill(cast(Any, number))
        if number == signal.SIGHUP:
            _drop_lost_outputs()
        if number == signal.SIGUSR1 and number != self._requeues_on:
            stopping.saves += 1
        elif self._came_at is None:
            self._came_at = time.monotonic()
            stopping.ask(number)
        elif time.monotonic() - self._came_at > SECOND_AFTER:
            self._end_at_once(trainer, "and a second signal ended the run at once")

    def _end_at_once(self, trainer: L.Trainer, reason: str) -> None:
        """End the process without waiting for its other threads."""
        number = _stopping(trainer).asked
        _say_at_once(self._sentence(trainer, number, reason))
        os._exit(128 + number if rank() == 0 else 0)

    # Saving

    def _end(self, trainer: L.Trainer, stopped: Stopped) -> None:
        done = "there was nothing to save"
        if trainer.state.fn == TrainerFn.FITTING:
            requeues = stopped.number == self._requeues_on and trainer.checkpoint_callback is not None
            saved = _save_for_slurm(trainer) if requeues else self._save(trainer, "stopped")
            done = "everything is saved" if saved.endswith("is saved") else saved
            if stopped.number == self._requeues_on and trainer.is_global_zero:
                done += f", and {_requeue()}"
        _say(self._sentence(trainer, stopped.number, done))

    def _save(self, trainer: L.Trainer, what: str) -> str:
        """Save beside the run's other checkpoints, if there are any; return a description. All ranks must call this."""
        callback, name = trainer.checkpoint_callback, f"{what}-{trainer.current_epoch}"
        if callback is None:
            return "nothing is saved, since trainer.enable_checkpointing is false"
        if isinstance(callback, RunCheckpoints):  # the callback later removes this checkpoint like its other ones
            return f"{callback.save(trainer, name=name)} is saved"
        path = Path(getattr(callback, "dirpath", None) or run_folder(trainer) / "checkpoints", f"{name}.ckpt")
        trainer.save_checkpoint(path, weights_only=False)
        return f"{path} is saved"

    def _sentence(self, trainer: L.Trainer, number: int, what: str) -> str:
        done, why = trainer.current_epoch, _why(_stopping(trainer), number)
        if trainer.state.fn != TrainerFn.FITTING:
            return f"stopped: {why}, {what}"
        where = f"in the validation of iteration {done + 1}" if trainer.validating else f"after iteration {done}"
        path = last_good_checkpoint(trainer)
        then = _how_to_continue(path, self.command) if path else "there is no checkpoint yet"
        return f"stopped {where}: {why}, {what}; {then}"


def _in_the_pipe(number: int, frame: FrameType | None) -> None:
    """Do nothing. A handler must be set for the interpreter to write the signal's number to the pipe."""


def _forget() -> None:
    """Restore default signal handling in a forked process, so that signals to it do not stop its parent's run."""
    handled = [number for number in signal.valid_signals() if signal.getsignal(number) is _in_the_pipe]
    if handled:
        signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)


def _drop_lost_outputs() -> None:
    """Redirect output to a lost terminal or a closed pipe to /dev/null, so that no error ends the run unsaved."""
    polled = select.poll()
    for number in (1, 2):
        polled.register(number, 0)  # poll always reports errors
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, event in polled.poll(0):
        if event & (select.POLLERR | select.POLLHUP):
            os.dup2(nowhere, number)
    os.close(nowhere)


def _how_to_continue(path: str, command: Sequence[str]) -> str:
    """Return the command or, in Python, the argument that resumes from a checkpoint."""
    if not command:
        return f"continue with ckpt_path={path!r}"
    kept: list[str] = []
    for argument in command:
        if kept and kept[-1] == "--ckpt_path":
            kept.pop()
        elif not argument.startswith("--ckpt_path="):
            kept.append(argument)
    return f"continue with: {shlex.join([*kept, '--ckpt_path', os.path.relpath(path)])}"


def _requeue_signal(trainer: L.Trainer) -> int:
    """Return the signal after which the SLURM job is requeued; 0 if there is none."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    # Strategies for one device have no `cluster_environment`. Lightning sets a handler only if the job is to be
    # requeued.
    if environment is None and SLURMEnvironment.detect() and callable(signal.getsignal(signal.SIGUSR1)):
        environment = SLURMEnvironment()
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return int(environment.requeue_signal or 0)
    return 0


def _save_for_slurm(trainer: L.Trainer) -> str:
    """Save to the path that the requeued job reads, keep the last two, return a description. All ranks call this."""
    root, callback = Path(trainer.default_root_dir), trainer.checkpoint_callback
    by_number = {int(path.stem.rpartition("_")[2]): path for path in root.glob(SLURM_SAVED)}
    number = max(by_number, default=0) + 1
    path = Path(trainer.strategy.broadcast(str(root / SLURM_SAVED.replace("*", str(number)))))
    trainer.save_checkpoint(path, weights_only=False)
    if trainer.is_global_zero:
        for old in sorted(by_number)[: 1 - SLURM_KEPT]:
            remove(by_number[old])
    if isinstance(callback, RunCheckpoints):
        name_last(trainer, str(path), Path(str(callback.dirpath)))
    return f"{path} is saved"


def _requeue() -> str:
    """Requeue the SLURM job, and return a description of the result."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"job {job} is not requeued, since scontrol cannot be run ({error.strerror})"
    if done.returncode:
        return f"job {job} is not requeued: {' '.join(done.stderr.split())}"
    return f"job {job} is requeued"


def _stopping(trainer: L.Trainer) -> Stopping:
    return cast(Stopping, cast(Any, trainer).datamodule.stopping)


def _why(stopping: Stopping, number: int) -> str:
    return stopping.reason or f"{signal.Signals(number).name} received"


@rank_zero_only
def _say_at_once(sentence: str) -> None:
    """Write to stderr without Python's buffers, whose lock another thread may hold."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"agentrl: {sentence}\n".encode())


@rank_zero_only
def _say(sentence: str) -> None:
    print(f"agentrl: {sentence}", file=sys.stderr, flush=True)
