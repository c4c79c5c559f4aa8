"""Guards: bounds on what the numbers of a run may be, and what happens beyond them."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections import deque
from typing import Any, ClassVar, Literal, cast, get_args

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.agents import Agent, Attempt, StepGuard, Verdict
from lightning_agentrl.distributed import all_gather, raise_once

Action = Literal["warn", "skip", "lower", "stop"]


class Guard(StepGuard):
    """Base of guards. What a guard says holds for all processes; its state is in checkpoints.

    Args:
        action: ``warn``; ``skip`` the step; ``lower`` the learning rates of actor and critic from this step on; or
            ``stop`` the run and name the last good checkpoint.
        factor: by which ``lower`` multiplies the rates, each time.
        patience: the guard acts when it is beyond its bound so many times in a row, then counts anew.
    """

    every_step = False  # judged anew at each step, else once in an iteration, before its first step
    skips_iteration: ClassVar[bool] = True  # ``skip`` leaves out the rest of the iteration, not one step only

    def __init__(self, action: Action = "warn", factor: float = 0.5, patience: int = 1) -> None:
        name = type(self).__name__
        if action not in get_args(Action):
            raise ValueError(f"action of {name} must be one of {', '.join(get_args(Action))}, got '{action}'")
        if not 0 < factor < 1 or patience < 1:
            raise ValueError(f"{name} needs a factor between 0 and 1 and patience >= 1, got {factor} and {patience}")
        self.action = action
        self.factor = factor
        self.patience = patience
        self.in_a_row = 0
        self.lowered = 1.0  # product of the factors so far
        self._iteration = -1  # the last one, by the number of attempts before it
        self._judged = False  # in this iteration
        self._skipping = ""  # why the rest of it is left out

    @abstractmethod
    def judge(self, attempt: Attempt) -> str | None:
        """Return what is beyond its bound as a sentence, empty if nothing is; None if the step does not tell."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.in_a_row, self.lowered = 0, 1.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Know no iteration of an earlier run, whose attempts may have the same numbers."""
        self._iteration = -1

    def before_step(self, trainer: L.Trainer, attempt: Attempt) -> tuple[Verdict, str]:
        if attempt.number - attempt.index != self._iteration:
            self._iteration, self._judged, self._skipping = attempt.number - attempt.index, False, ""
        if self._skipping:
            return Verdict.SKIP, self._skipping
        if self._judged and not self.every_step:
            return Verdict.STEP, ""
        self._judged = True
        found = [sentence for sentence in all_gather(self.judge(attempt)) if sentence is not None]
        if not found:
            return Verdict.STEP, ""
        reason = next(filter(None, found), "")
        self.in_a_row = self.in_a_row + 1 if reason else 0
        if self.in_a_row < self.patience:
            return Verdict.STEP, ""
        self.in_a_row = 0
        return self._act(f"{type(self).__name__}: {reason}")

    def _act(self, reason: str) -> tuple[Verdict, str]:
        if self.action == "stop":
            return Verdict.STOP, reason
        if self.action == "skip":
            self._skipping = reason if self.skips_iteration else ""
            return Verdict.SKIP, reason
        if self.action == "lower":
            self.lowered *= self.factor
            reason += f"; learning rates are multiplied by {self.factor:g}, by {self.lowered:g} in all"
        rank_zero_warn(reason)
        return Verdict.STEP, ""

    @property
    def state_key(self) -> str:
        return self._generate_state_key(action=self.action)  # a run may have one that warns and one that stops

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "lowered": self.lowered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row = state_dict["in_a_row"]
        self.lowered = state_dict["lowered"]


class KLCeiling(Guard):
    """A guard for a KL that is too large.

    Args:
        ceiling: largest KL, a mean over tokens.
        of: ``reference``, ``kl/reference`` of a rollout, judged before the update; or ``update``,
            ``policy/approx_kl`` of each step, where ``skip`` leaves out the other steps of the iteration.
        action: see :class:`Guard`.
        factor: see :class:`Guard`.
        patience: see :class:`Guard`.
    """

    def __init__(
        self,
        ceiling: float,
        of: Literal["reference", "update"] = "reference",
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        super().__init__(action, factor, patience)
        self.ceiling = ceiling
        self.of = of
        self.every_step = of == "update"

    @property
    def state_key(self) -> str:
        return self._generate_state_key(of=self.of, action=self.action)  # a run may have one of each

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        with raise_once():
            if stage == "fit" and self.of == "reference" and not cast(Agent, pl_module).needs.ref_logps:
                raise ValueError(
                    "KLCeiling of the reference needs a reference, and none is kept; set model.init_args.kl.reward or "
                    "model.init_args.kl.loss above 0, or the callback's init_args.of to update"
                )

    def judge(self, attempt: Attempt) -> str | None:
        if self.of == "reference":
            return _beyond("kl/reference", attempt.rollout, high=self.ceiling)
        return _beyond("policy/approx_kl", attempt.metrics, high=self.ceiling)


class ValidActionFloor(Guard):
    """A guard for too few valid actions in a rollout, judged before the update.

    Args:
        floor: smallest ``rollout/valid_action_ratio``.
        action: see :class:`Guard`.
        factor: see :class:`Guard`.
        patience: see :class:`Guard`.
    """

    def __init__(self, floor: float = 0.5, action: Action = "warn", factor: float = 0.5, patience: int = 1) -> None:
        super().__init__(action, factor, patience)
        if not 0 < floor <= 1:
            raise ValueError(f"floor of ValidActionFloor must be above 0 and at most 1, got {floor}")
        self.floor = floor

    def judge(self, attempt: Attempt) -> str | None:
        return _beyond("rollout/valid_action_ratio", attempt.rollout, low=self.floor)


class RepetitionGuard(Guard):
    """A guard for replies of a rollout that repeat themselves, judged before the update.

    Args:
        floor: smallest ``text/distinct_in_turn``, the share of distinct word pairs among those of a reply.
        action: see :class:`Guard`.
        factor: see :class:`Guard`.
        patience: see :class:`Guard`.
    """

    def __init__(self, floor: float = 0.3, action: Action = "warn", factor: float = 0.5, patience: int = 1) -> None:
        super().__init__(action, factor, patience)
        if not 0 < floor <= 1:
            raise ValueError(f"floor of RepetitionGuard must be above 0 and at most 1, got {floor}")
        self.floor = floor

    def judge(self, attempt: Attempt) -> str | None:
        return _beyond("text/distinct_in_turn", attempt.rollout, low=self.floor)


class EntropyBounds(Guard):
    """A guard for an entropy that collapses or explodes, judged before the update.

    The entropy is ``rollout/entropy``, or ``policy/entropy`` of an iteration's first step if rollouts are not scored.

    Args:
        low: smallest entropy of a token in nats; null: none.
        high: largest entropy; null: none.
        action: see :class:`Guard`.
        factor: see :class:`Guard`.
        patience: see :class:`Guard`.
    """

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        super().__init__(action, factor, patience)
        if low is None and high is None:
            raise ValueError("EntropyBounds needs low or high")
        self.low = low
        self.high = high

    def judge(self, attempt: Attempt) -> str | None:
        if "rollout/entropy" in attempt.rollout:
            return _beyond("rollout/entropy", attempt.rollout, self.low, self.high)
        return _beyond("policy/entropy", attempt.metrics, self.low, self.high)


class GradientSpikes(Guard):
    """A guard for gradients far above those before them.

    The logarithm of a group's gradient norm is compared with the median of the last ``window`` ones, in units of their
    median absolute deviation. A spike is among these too, so a lasting change becomes the new scale.

    Args:
        deviations: how many of these units (each at least a factor of 1.1) make a spike.
        window: number of steps that are compared with.
        after: number of steps without a verdict at the beginning.
        action: see :class:`Guard`; ``skip`` leaves out the one step.
        factor: see :class:`Guard`.
        patience: see :class:`Guard`.
    """

    every_step = True
    skips_iteration: ClassVar[bool] = False

    def __init__(
        self,
        deviations: float = 10.0,
        window: int = 100,
        after: int = 20,
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        super().__init__(action, factor, patience)
        if not deviations > 0 or not 2 <= after <= window:
            raise ValueError(
                f"GradientSpikes needs deviations > 0 and 2 <= after <= window, got {deviations}, {after} and {window}"
            )
        self.deviations = deviations
        self.window = window
        self.after = after
        self.norms: dict[str, deque[float]] = {}  # logarithms, by group

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:
            self.norms = {}
        with raise_once():
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                raise ValueError(
                    "GradientSpikes needs gradient norms before the step, and DeepSpeed computes them in it; remove "
                    "the callback, or set trainer.strategy to ddp or ModelParallelStrategy"
                )

    def judge(self, attempt: Attempt) -> str | None:
        found = [self._spike(name, norm) for name, norm in attempt.norms.items() if norm > 0]
        return ", ".join(filter(None, found)) if found else None

    def _spike(self, name: str, norm: float) -> str:
        """Compare a norm with those before it, and add it to them."""
        seen = self.norms.setdefault(name, deque(maxlen=self.window))
        known, log = list(seen), math.log(norm)
        seen.append(log)
        if len(known) < self.after:
            return ""
        middle = statistics.median(known)
        unit = max(1.4826 * statistics.median(abs(x - middle) for x in known), math.log(1.1))
        bound = middle + self.deviations * unit
        if log <= bound:
            return ""
        return f"the gradient norm of the {name} is {norm:.4g}, above {math.exp(bound):.4g}"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"norms": {name: list(norms) for name, norms in self.norms.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.norms = {name: deque(norms, maxlen=self.window) for name, norms in state_dict["norms"].items()}


def _beyond(name: str, numbers: Any, low: float | None = None, high: float | None = None) -> str | None:
    """Return a sentence if a number is below or above its bound, an empty one if not; None if it is not there."""
    if name not in numbers:
        return None
    value = numbers[name]
    if low is not None and value < low:
        return f"{name} is {value:.4g}, below {low:g}"
    if high is not None and value > high:
        return f"{name} is {value:.4g}, above {high:g}"
    return ""
