"""Guards: bounds on metrics of a run, with an action if a bound is exceeded."""

from __future__ import annotations

import difflib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.agents import Agent, Attempt, StepGuard, Verdict
from lightning_agentrl.distributed import all_gather, raise_once

Action = Literal["warn", "skip", "lower", "stop"]


class Guard(StepGuard):
    """Bound one metric of a run. All processes act together, and checkpoints contain the guard's state.

    Args:
        metric: name of the metric, as it is logged. Metrics of a rollout are checked once, before the update; metrics
            of a step are checked at each step.
        low: smallest accepted value; null: no bound.
        high: largest accepted value; null: no bound.
        action: action if the bound is exceeded: ``warn``; ``skip`` the step and the rest of its iteration; ``lower``
            the learning rates of actor and critic from this step on; or ``stop`` the run and name the last good
            checkpoint.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action; then counting starts again.
    """

    skips_iteration: ClassVar[bool] = True

    def __init__(
        self,
        metric: str,
        low: float | None = None,
        high: float | None = None,
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        name = type(self).__name__
        if action not in get_args(Action):
            raise ValueError(f"action of {name} must be one of {', '.join(get_args(Action))}, got '{action}'")
        if not 0 < factor < 1 or patience < 1:
            raise ValueError(f"{name} needs a factor between 0 and 1 and patience >= 1, got {factor} and {patience}")
        if low is None and high is None:
            raise ValueError(f"{name} needs low or high")
        self.metrics: Sequence[str] = [metric]  # names of metrics; the first metric that is logged is checked
        self.low, self.high = low, high
        self.action, self.factor, self.patience = action, factor, patience
        self.in_a_row = 0
        self.lowered = 1.0  # product of the factors so far
        self._iteration = -1  # current iteration, as the number of attempts before it
        self._judged = False  # whether the rollout of this iteration was checked
        self._skipping = ""  # reason to skip the rest of this iteration
        self._looked_up = False  # whether it was checked that the metric is logged at all

    def judge(self, attempt: Attempt) -> str | None:
        """Return a message if the metric is beyond its bound, an empty string if not, None if it was not logged."""
        numbers = {**attempt.metrics, **attempt.rollout}
        name = next((metric for metric in self.metrics if metric in numbers), None)
        if name is None:
            return None
        if self.low is not None and numbers[name] < self.low:
            return f"{name} is {numbers[name]:.4g}, below {self.low:g}"
        if self.high is not None and numbers[name] > self.high:
            return f"{name} is {numbers[name]:.4g}, above {self.high:g}"
        return ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset the state of an earlier run; a checkpoint is loaded later."""
        self._iteration = -1
        if stage == "fit" and trainer.global_step == 0:
            self.in_a_row, self.lowered = 0, 1.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn once if the metric is never logged, for example because its name is misspelled."""
        known = trainer.callback_metrics
        if type(self) is Guard and not self._looked_up and cast(Agent, pl_module).phase == "train":
            self._looked_up = True
            if self.metrics[0] not in known:
                near = difflib.get_close_matches(self.metrics[0], known, n=1)
                rank_zero_warn(
                    f"the metric {self.metrics[0]} of a Guard is not logged; did you mean {near or sorted(known)}?"
                )

    def before_step(self, trainer: L.Trainer, attempt: Attempt) -> tuple[Verdict, str]:
        if attempt.number - attempt.index != self._iteration:
            self._iteration, self._judged, self._skipping = attempt.number - attempt.index, False, ""
        if self._skipping:
            return Verdict.SKIP, self._skipping
        if self._judged:
            return Verdict.STEP, ""
        self._judged = any(metric in attempt.rollout for metric in self.metrics)
        found = [sentence for sentence in all_gather(self.judge(attempt)) if sentence is not None]
        reason = next(filter(None, found), "")
        if found:
            self.in_a_row = self.in_a_row + 1 if reason else 0
        if not reason or self.in_a_row < self.patience:
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
        return self._generate_state_key(metric=self.metrics[0], action=self.action)  # a run may have several guards

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "lowered": self.lowered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row, self.lowered = state_dict["in_a_row"], state_dict["lowered"]


class KLCeiling(Guard):
    """Guard against a KL that is too large.

    Args:
        ceiling: largest KL, averaged over tokens, in nats.
        of: KL to bound: ``reference``: ``kl/reference`` of a rollout; ``update``: ``policy/approx_kl`` of each step.
        action: action if the bound is exceeded: ``warn``, ``skip``, ``lower`` or ``stop``, see :class:`Guard`.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action.
    """

    def __init__(
        self,
        ceiling: float,
        of: Literal["reference", "update"] = "reference",
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        metric = "kl/reference" if of == "reference" else "policy/approx_kl"
        super().__init__(metric, None, ceiling, action, factor, patience)
        self.of = of

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        with raise_once():
            if stage == "fit" and self.of == "reference" and not cast(Agent, pl_module).needs.ref_logps:
                raise ValueError(
                    "KLCeiling needs a reference policy, and the run has none; set model.init_args.kl.reward or "
                    "model.init_args.kl.loss above 0, or the callback's init_args.of to update"
                )


class ValidActionFloor(Guard):
    """Guard against too few valid actions in a rollout: ``rollout/valid_action_ratio``.

    Args:
        floor: smallest accepted fraction of valid actions.
        action: action if the bound is exceeded: ``warn``, ``skip``, ``lower`` or ``stop``, see :class:`Guard`.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action.
    """

    def __init__(self, floor: float = 0.5, action: Action = "warn", factor: float = 0.5, patience: int = 1) -> None:
        super().__init__("rollout/valid_action_ratio", floor, None, action, factor, patience)


class RepetitionGuard(Guard):
    """Guard against replies that repeat themselves: ``text/distinct_in_turn`` of a rollout.

    Args:
        floor: smallest accepted fraction of distinct word pairs in a reply.
        action: action if the bound is exceeded: ``warn``, ``skip``, ``lower`` or ``stop``, see :class:`Guard`.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action.
    """

    def __init__(self, floor: float = 0.3, action: Action = "warn", factor: float = 0.5, patience: int = 1) -> None:
        super().__init__("text/distinct_in_turn", floor, None, action, factor, patience)


class EntropyBounds(Guard):
    """Guard against an entropy that collapses or explodes.

    The entropy is ``rollout/entropy``, or ``policy/entropy`` of each step if rollouts are not scored.

    Args:
        low: smallest entropy of a token in nats; null: no bound.
        high: largest entropy of a token in nats; null: no bound.
        action: action if the bound is exceeded: ``warn``, ``skip``, ``lower`` or ``stop``, see :class:`Guard`.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action.
    """

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        action: Action = "warn",
        factor: float = 0.5,
        patience: int = 1,
    ) -> None:
        super().__init__("rollout/entropy", low, high, action, factor, patience)
        self.metrics = ["rollout/entropy", "policy/entropy"]


class GradientSpikes(Guard):
    """Guard against gradient norms far above earlier ones.

    The logarithm of a group's gradient norm is compared with the median of the last ``window`` steps, in units of their
    median absolute deviation. Spikes are included in the window, so a lasting change becomes the new scale. ``skip``
    skips one step only.

    Args:
        deviations: number of median absolute deviations (each at least a factor of 1.1) above the median from which a
            norm is a spike.
        window: number of previous steps to compare with.
        after: number of steps at the start that never count as spikes.
        action: action if the bound is exceeded: ``warn``, ``skip``, ``lower`` or ``stop``, see :class:`Guard`.
        factor: factor by which ``lower`` multiplies the learning rates, each time.
        patience: number of consecutive values beyond the bound before the action.
    """

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
        super().__init__("grad_norm", None, math.inf, action, factor, patience)
        if not 2 <= after <= window:
            raise ValueError(f"GradientSpikes needs 2 <= after <= window, got {after} and {window}")
        self.deviations = deviations
        self.window = window
        self.after = after
        self.norms: dict[str, deque[float]] = {}  # logarithms of recent norms by group

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:
            self.norms = {}
        with raise_once():
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                raise ValueError(
                    "GradientSpikes needs gradient norms before the step, but DeepSpeed computes them in the step"
                )

    def judge(self, attempt: Attempt) -> str | None:
        found = [self._spike(name, norm) for name, norm in attempt.norms.items() if norm > 0]
        return ", ".join(filter(None, found)) if found else None

    def _spike(self, name: str, norm: float) -> str:
        """Compare a norm with earlier norms and record it; return a message if it is a spike, else an empty string."""
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
