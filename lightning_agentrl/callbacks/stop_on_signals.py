"""Saving when a run is told to end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_agentrl.agents.checkpoint import last_good_checkpoint, remove
from lightning_agentrl.callbacks.run_checkpoints import RunCheckpoints
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.callbacks.signal_watch import SignalWatch
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.stopping import Stopped

OFF = "trainer.enable_checkpointing is false"
SLURM_SAVED, SLURM_KEPT = "hpc_ckpt_*.ckpt", 2  # Lightning's name of what a job that is started again goes on with


class StopOnSignals(L.Callback):
    """Saving when the run is told to end, by SIGTERM, Ctrl-C or a terminal that is closed, to any of its processes.

    A collection, scoring or validation is left and repeated when the run goes on. An update is finished. Then the run
    saves ``stopped-<iterations>.ckpt`` beside its other checkpoints and ends with 143 after SIGTERM, 130 after Ctrl-C,
    129 after SIGHUP, which a terminal sends as it is closed (but to no run that was started with ``nohup``).
    A run without a server of its engine, for longer than it may wait, does so too, with 143. A second signal ends it at
    once. SIGUSR1 saves ``saved-<iterations>.ckpt`` after the running stage and goes on.

    Under SLURM, SIGUSR1 (``sbatch --signal=SIGUSR1@90``) ends the run too, and ``scontrol`` puts the job back into the
    queue, where the same command goes on with what was saved.

    ``agentrl`` and ``lightning_agentrl.Trainer`` have this callback with its defaults. With Lightning's own Trainer,
    put it first in the list of callbacks. ``fit`` raises ``SystemExit`` once the run is saved.

    Args:
        grace_seconds: seconds from the first signal to the end of the process, if it has not come to save by then. The
            last checkpoint is named in any case.
    """

    def __init__(self, grace_seconds: float = 30.0) -> None:
        self.grace_seconds = grace_seconds
        self.command: Sequence[str] = ()  # of this run, which with another ckpt_path continues it
        self.ends_at: float | None = None  # by the monotonic clock, after a signal
        self._saved = ""  # checkpoint that a signal asked for
        self._watch: SignalWatch | None = None

    # Lightning puts its own handlers in place after on_fit_start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._begin(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and end if a signal came in the last update, before other callbacks use the trained weights."""
        _data(trainer).stopping.agree()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            if isinstance(exception, Stopped):
                self._end(trainer, exception)
        finally:
            self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _begin(self, trainer: L.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("signals are not handled, since Python does so in the main thread only and this is another")
            return
        requeues = _requeue_signal(trainer)
        ends = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *([] if requeues is None else [requeues])]
        saves = [number for number in (signal.SIGUSR1,) if number not in ends]
        stopping = _data(trainer).stopping
        stopping.begin(lambda: self._save_and_go_on(trainer))
        self._watch = SignalWatch(
            ends,
            saves,
            stopping,
            self.grace_seconds,
            lambda: _say_at_once(self._announcement(trainer, stopping.asked)),
            lambda reason: _say_at_once(self._sentence(trainer, stopping.asked, reason)),
        )

    def _save_and_go_on(self, trainer: L.Trainer) -> None:
        saved = self._save(trainer, ends=False)
        _say(f"SIGUSR1 came: {self._saved} is saved" if saved else f"SIGUSR1 came: nothing is saved, since {OFF}")

    def _end(self, trainer: L.Trainer, stopped: Stopped) -> None:
        said = "there was nothing to save"
        if trainer.state.fn == TrainerFn.FITTING:
            requeues = stopped.number == _requeue_signal(trainer)
            said = (
                "all is saved"
                if self._save(trainer, ends=True, for_slurm=requeues)
                else f"nothing is saved, since {OFF}"
            )
            if requeues and trainer.is_global_zero:
                said += f", and {_requeue()}"
        self.ends_at = None if self._watch is None else self._watch.ends_at
        _say(self._sentence(trainer, stopped.number, said))

    def _save(self, trainer: L.Trainer, ends: bool, for_slurm: bool = False) -> bool:
        """Save, unless the run has no checkpoints; return whether it did. All ranks must call it."""
        callback = trainer.checkpoint_callback
        if callback is None:
            return False
        name = f"{'stopped' if ends else 'saved'}-{trainer.current_epoch}"
        if not for_slurm and isinstance(
            callback, RunCheckpoints
        ):  # removed like its others when it is none of the last
            self._saved = callback.save(trainer, name=name)
            return True
        folder = getattr(callback, "dirpath", None) or run_folder(trainer) / "checkpoints"
        path = str(Path(folder) / f"{name}.ckpt")
        if for_slurm:  # where the job that is started again looks for it
            root = trainer.default_root_dir
            path = trainer.strategy.broadcast(cast(Any, trainer)._checkpoint_connector.hpc_save_path(root))
        trainer.save_checkpoint(path, weights_only=False)
        if for_slurm and trainer.is_global_zero:
            saved = Path(path).parent.glob(SLURM_SAVED)
            for old in sorted(saved, key=lambda file: int(file.stem.rpartition("_")[2]))[:-SLURM_KEPT]:
                remove(old)
        if isinstance(callback, RunCheckpoints):
            callback.name_last(trainer, path)
        self._saved = path
        return True

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # Sentences

    def _announcement(self, trainer: L.Trainer, number: int) -> str:
        return (
            f"{_why(trainer, number)}: the run saves and ends, in at most {self.grace_seconds:g} s; "
            "a second signal ends it at once"
        )

    def _sentence(self, trainer: L.Trainer, number: int, what: str) -> str:
        done = trainer.current_epoch
        where = f"in the validation of iteration {done + 1}" if trainer.validating else f"after iteration {done}"
        why = _why(trainer, number)
        head = f"stopped {where}: {why}, {what}"
        if trainer.state.fn != TrainerFn.FITTING:
            return f"stopped: {why}, {what}"
        path = last_good_checkpoint(trainer)
        return f"{head}; {how_to_continue(path, self.command)}" if path else f"{head}; there is no checkpoint yet"


def how_to_continue(path: str | Path, command: Sequence[str]) -> str:
    """Return what to type, or to write in Python, to go on with a checkpoint.

    Args:
        path: of the checkpoint.
        command: of the run; empty in Python.
    """
    if not command:
        return f"continue with ckpt_path={str(path)!r}"
    kept: list[str] = []
    for argument in command:
        if kept and kept[-1] == "--ckpt_path":
            kept.pop()
        elif not argument.startswith("--ckpt_path="):
            kept.append(argument)
    return f"continue with: {shlex.join([*kept, '--ckpt_path', os.path.relpath(path)])}"


def _requeue_signal(trainer: L.Trainer) -> int | None:
    """Return the signal after which SLURM is to start the job again."""
    environment = cast(Any, trainer)._accelerator_connector.cluster_environment
    requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return int(environment.requeue_signal) if requeues else None


def _requeue() -> str:
    """Put the SLURM job back into the queue; return what came of it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"job {job} is not requeued, since scontrol cannot be run ({error.strerror})"
    if done.returncode:
        return f"job {job} is not requeued: {' '.join(done.stderr.split())}"
    return f"job {job} is requeued"


def _data(trainer: L.Trainer) -> RolloutDataModule:
    return cast(RolloutDataModule, cast(Any, trainer).datamodule)


def _why(trainer: L.Trainer, number: int) -> str:
    return _data(trainer).stopping.reason or f"{signal.Signals(number).name} came"


@rank_zero_only
def _say(sentence: str) -> None:
    print(f"agentrl: {sentence}", file=sys.stderr, flush=True)


@rank_zero_only
def _say_at_once(sentence: str) -> None:
    """Write past Python's buffers, which another thread may hold."""
    with suppress(OSError):  # nobody may read it any more
        os.write(2, f"agentrl: {sentence}\n".encode())
