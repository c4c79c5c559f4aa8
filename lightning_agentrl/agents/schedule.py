"""How learning rates change over a run: by the steps that actor and critic have taken, each by its own count.

A rate is a pure function of its group's schedule and count. So the counts are all that a checkpoint has to hold, and
what is changed in the config holds from the next step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.types.plain_config import check_kind

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of actor or critic over the steps that it takes.

    Steps that are skipped do not count, and for the actor neither do those of the critic warm-up.

    Args:
        shape: after the warm-up the rate stays (``constant``), or falls along a line or half a cosine wave.
        warmup_steps: first steps, in which the rate rises by equal parts; the one after them is the first at full rate.
        steps: the rate has fallen to its end after so many, those of the warm-up among them; null: all of the run,
            by ``trainer.max_epochs`` or ``trainer.max_steps``.
        final: share of the full rate at the end.
    """

    shape: Shape = "constant"
    warmup_steps: int = 0
    steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        wrong = ""
        if self.shape not in get_args(Shape):
            wrong = f"shape must be one of {', '.join(get_args(Shape))}, got '{self.shape}'"
        elif self.warmup_steps < 0:
            wrong = f"warmup_steps must not be negative, got {self.warmup_steps}"
        elif self.shape == "constant" and (self.steps is not None or self.final):
            wrong = "a constant rate has no end; remove steps and final, or set shape to linear or cosine"
        elif self.steps is not None and self.steps <= self.warmup_steps:
            wrong = f"steps count the warm-up too: {self.steps} must be above warmup_steps {self.warmup_steps}"
        elif not 0 <= self.final <= 1:
            wrong = f"final is a share of the full rate from 0 to 1, got {self.final}"
        if wrong:
            raise ValueError(f"model.init_args.optim.schedule: {wrong}")

    def share(self, taken: int, run: int | None) -> float:
        """Return the share of the full rate for the next step.

        Args:
            taken: steps before it.
            run: steps of the whole run; None: not known, and then :attr:`steps` is.
        """
        if taken < self.warmup_steps:
            return (taken + 1) / (self.warmup_steps + 1)
        if self.shape == "constant":
            return 1.0
        steps = self.steps or run
        assert steps is not None
        done = min((taken - self.warmup_steps) / max(steps - self.warmup_steps, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left


@dataclass(frozen=True)
class Schedules:
    """Schedules of both parameter groups; constant rates by default.

    Args:
        actor: begins with the actor's first step, after the critic warm-up.
        critic: begins with the first step of the run.
    """

    actor: Schedule = Schedule()
    critic: Schedule = Schedule()

    def __post_init__(self) -> None:
        for name, schedule in self.of.items():
            check_kind(schedule, Schedule, f"model.init_args.optim.schedule.{name}")

    @property
    def of(self) -> dict[str, Schedule]:
        """The schedules by group."""
        return {"actor": self.actor, "critic": self.critic}


def check_schedules(schedules: Schedules, steps: Mapping[str, int | None]) -> None:
    """Refuse schedules whose end nobody knows, and warn of those that the run is too short for.

    Args:
        schedules: of both groups.
        steps: that each group takes in the run; None: not known.

    Raises:
        ValueError: one sentence with the key to change.
    """
    for name, schedule in schedules.of.items():
        key, run = f"model.init_args.optim.schedule.{name}", steps[name]
        if run is None:
            if schedule.shape != "constant" and schedule.steps is None:
                raise ValueError(
                    f"{key} falls until the end of the run, and trainer.max_epochs does not say when that is; set it, "
                    f"or {key}.steps"
                )
        elif schedule.warmup_steps >= run > 0:
            rank_zero_warn(
                f"{key}.warmup_steps {schedule.warmup_steps} is no less than the {run} steps that the {name} takes in "
                "this run, so its full rate is never reached; lower it, or raise trainer.max_epochs"
            )
