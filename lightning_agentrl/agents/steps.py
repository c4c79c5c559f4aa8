"""The optimizer steps of a run: planned, attempted, taken or skipped, and the learning rates that follow from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.agents.checkpoint_files import last_good_checkpoint
from lightning_agentrl.agents.finite import FiniteSteps
from lightning_agentrl.agents.hooks import Attempt, StepGuard, Verdict, decide
from lightning_agentrl.agents.optimizer import Optim
from lightning_agentrl.agents.rates import Rates
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.errors import RunStoppedError
from lightning_agentrl.rollout import RolloutSource


class Steps:
    """Counts and learning rates of the steps, which a checkpoint holds.

    Each step that is skipped lowers Lightning's ``max_steps``: its loop counts those that were taken, and would go on
    into one more iteration.

    Args:
        optim: learning rates and limits.
    """

    def __init__(self, optim: Optim) -> None:
        self.attempts = 0
        self.skipped = 0  # by which max_steps was lowered in this run
        self._missed = 0  # attempts of the whole run, also before it was continued, that were no step
        self.rates = Rates(optim.schedule)
        self.finite = FiniteSteps(optim.max_not_finite)

    def begin_anew(self) -> None:
        """Forget the steps of an earlier run. Attempts go on: they number the weights, which episodes know."""
        self._missed = self.finite.in_a_row = 0
        self.rates.begin_anew()

    def begin(self, trainer: L.Trainer) -> list[str]:
        """Set learning rates and weight decay as they are configured, in a resumed run too.

        Returns:
            Sentences about what differs from the checkpoint.
        """
        differences = self.rates.begin(trainer.optimizers[0], planned_steps(trainer), _lowered(trainer))
        self.skipped = 0
        if cast(Any, trainer).ckpt_path:
            self._skip(trainer, self._missed)
        return differences

    def allow(self, trainer: L.Trainer, attempt: Attempt, fault: str) -> bool:
        """Ask the guards; return whether to step. The one place where a step can be skipped, on all ranks together.

        Args:
            trainer: of the run.
            attempt: the step.
            fault: what of it is not finite on this rank.

        Raises:
            RunStoppedError: on all ranks, if a guard says so.
        """
        verdict, reason = self.finite.judge(fault, attempt.norms)
        if verdict is Verdict.STEP:
            verdict, reason = decide(trainer, _guards(trainer), attempt)
        if verdict is Verdict.STOP:
            stop_run(trainer, f"stopped before optimizer step {attempt.number + 1}: {reason}")
        if verdict is Verdict.SKIP:
            rank_zero_warn(f"optimizer step {attempt.number + 1} is skipped: {reason}")
            self._skip(trainer, 1)
        if verdict is Verdict.STEP:
            self.rates.set(_lowered(trainer))
        return verdict is Verdict.STEP

    def count(self, held: Collection[str], skipped: bool) -> None:
        """Count an attempt, and where the step was taken, set the rates of the next.

        Args:
            held: names of the groups that do not move in this phase.
            skipped: whether the step was.
        """
        self.attempts += 1
        self._missed += skipped
        if not skipped:
            self.rates.count(held)

    def held(self, trainer: L.Trainer) -> range:
        """Return the numbers of the attempts of this run in which the actor does not move."""
        began = self.attempts - self._missed - trainer.global_step
        return range(began, began + held_steps(trainer))

    def _skip(self, trainer: L.Trainer, steps: int) -> None:
        loop = cast(Any, trainer).fit_loop.epoch_loop
        if loop.max_steps > 0:
            loop.max_steps -= steps
            self.skipped += steps

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return {
            "attempts": self.attempts,
            "missed_steps": self._missed,
            "rates": self.rates.state_dict(),
            "not_finite_in_a_row": self.finite.in_a_row,
        }

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from the entries of a checkpoint."""
        self.attempts, self._missed = checkpoint["attempts"], checkpoint["missed_steps"]
        self.finite.in_a_row = checkpoint["not_finite_in_a_row"]
        self.rates.load_state_dict(checkpoint["rates"])


def planned_steps(trainer: L.Trainer) -> dict[str, int | None]:
    """Return the steps that each group takes in the whole run, if none is skipped; None: its length is not known."""
    epochs, steps = trainer.max_epochs or -1, trainer.max_steps
    every = min((n for n in (epochs * _per_iteration(trainer), steps) if n > 0), default=None)
    return {"actor": None if every is None else max(every - held_steps(trainer), 0), "critic": every}


def held_steps(trainer: L.Trainer) -> int:
    """Return the steps at the start of the run in which the actor does not move."""
    warmups = (c.warmup_iterations for c in cast(Any, trainer).callbacks if isinstance(c, RolloutSource))
    return _per_iteration(trainer) * sum(warmups)


def stop_run(trainer: L.Trainer, reason: str) -> NoReturn:
    """End the run on all ranks, of which one says why; every rank must call it.

    Raises:
        RunStoppedError: with the last good checkpoint.
    """
    with raise_once():
        raise RunStoppedError(reason, last_good_checkpoint(trainer))
    raise AssertionError


def _guards(trainer: L.Trainer) -> list[StepGuard]:
    return [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, StepGuard)]


def _lowered(trainer: L.Trainer) -> float:
    """Return by how much guards have lowered the learning rates."""
    return math.prod(guard.lowered for guard in _guards(trainer))


def _per_iteration(trainer: L.Trainer) -> int:
    return cast(Any, trainer).datamodule.steps_per_iteration
