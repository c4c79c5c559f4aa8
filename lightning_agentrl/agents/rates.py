"""The learning rates of a run, written into the optimizer whenever something they follow from has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_agentrl.agents.schedule import Schedules
from lightning_agentrl.errors import CheckpointError

GROUPS = ("actor", "critic")


class Rates:
    """Learning rates of actor and critic: by the schedules, or by schedulers that a subclass has returned from
    ``configure_optimizers``; and then multiplied by what guards have lowered them to.

    Args:
        schedules: of both groups.
    """

    def __init__(self, schedules: Schedules) -> None:
        self.schedules = schedules
        self.schedulers: list[LRSchedulerConfig] = []
        self.taken = dict.fromkeys(GROUPS, 0)  # steps, by group
        self.lowered = 1.0
        self._groups: list[dict[str, Any]] = []  # of the optimizer, on which it is built anew
        self._full: dict[str, float] = {}  # rates by group, as the optimizer was made
        self._decay: dict[str, Any] = {}
        self._steps: Mapping[str, int | None] = {}  # of the run, by group
        self._scheduled: list[float] = []  # rates that schedulers have set, by the place of the group
        self._saved: dict[str, Any] | None = None

    def reading(self, configure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a ``configure_optimizers`` whose optimizers and schedulers are read; of one that is so, itself."""
        return configure if isinstance(configure, partial) else partial(self._read_of, configure)

    def _read_of(self, configure: Callable[[], Any]) -> Any:
        return self.read(configure())

    def read(self, returned: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        """Keep rates, decay and schedulers of what ``configure_optimizers`` has returned, before states are loaded.

        Returns:
            The same for Lightning, without the keys that it drops with a warning where optimization is manual.

        Raises:
            ValueError: the groups are not those of the agent, or the rates are set twice.
        """
        optimizers, schedulers, monitor = _configure_optimizers(returned)
        self.schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = [group.get("name") for group in groups]
        if len(optimizers) != 1 or len({*names}) != len(names) or not {*names} <= {*GROUPS}:
            raise ValueError(
                f"configure_optimizers must return one optimizer whose groups are named actor and critic, got {names}; "
                "begin with that of super().configure_optimizers()"
            )
        if self.schedulers and self.schedules != Schedules():
            raise ValueError(
                "configure_optimizers returns schedulers, and model.init_args.optim.schedule sets the learning rates "
                "too; remove one of them"
            )
        if wrong := [config.frequency for config in self.schedulers if config.frequency < 1]:
            raise ValueError(f"frequency of a scheduler must be at least 1, got {wrong[0]} (configure_optimizers)")
        self._full = {group["name"]: group["lr"] for group in groups}
        self._decay = {group["name"]: group.get("weight_decay") for group in groups}
        kept = ("scheduler", "interval", "frequency", "name")
        return optimizers, [{key: getattr(config, key) for key in kept} for config in self.schedulers]

    def begin_anew(self) -> None:
        """Forget the steps of an earlier run."""
        self.taken, self._saved = dict.fromkeys(GROUPS, 0), None

    def begin(self, optimizer: Any, steps: Mapping[str, int | None], lowered: float) -> list[str]:
        """Set rates and decay as they are configured, at the start of a run and where one is continued.

        Args:
            optimizer: after its state was loaded.
            steps: that each group takes in the run; None: not known.
            lowered: product of the factors of guards.

        Returns:
            Sentences about what differs from the checkpoint; none at the start of a run.

        Raises:
            CheckpointError: it was saved with another number of schedulers.
        """
        self._groups, self._steps = optimizer.param_groups, steps
        before = [dict(group) for group in self._groups]
        self._scheduled = [group["lr"] for group in self._groups]
        resumed = self._saved is not None
        if self._saved is not None:
            if len(self.schedulers) != self._saved["schedulers"]:
                raise CheckpointError(
                    f"was saved with {self._saved['schedulers']} schedulers of configure_optimizers, this run has "
                    f"{len(self.schedulers)}",
                    "return as many as it did, or leave ckpt_path out",
                )
            self._scheduled = self._saved["scheduled"] or self._scheduled
            self._saved = None
        for group in self._groups:
            if self._decay[group["name"]] is not None:
                group["weight_decay"] = self._decay[group["name"]]
        self.set(lowered)
        return [
            f"{key} of the {group['name']}: {group[key]}, in the checkpoint it was {old[key]}"
            for old, group in zip(before, self._groups, strict=True)
            for key in ("lr", "weight_decay")
            if resumed and key in group and group[key] != old[key]
        ]

    def set(self, lowered: float) -> None:
        """Write the rates of the next step into the optimizer, multiplied by what guards say."""
        self.lowered = lowered
        rates = self._scheduled if self.schedulers else [self._by_schedule(group["name"]) for group in self._groups]
        for group, rate in zip(self._groups, rates, strict=True):
            group["lr"] = rate * lowered

    def _by_schedule(self, name: str) -> float:
        return self._full[name] * self.schedules.of[name].share(self.taken[name], self._steps[name])

    def count(self, held: Collection[str]) -> None:
        """Count a step that was taken by all groups but those that are held, and set the rates of the next."""
        for name in self.taken:
            self.taken[name] += name not in held
        self.set(self.lowered)

    def advance(
        self,
        interval: str,
        number: int,
        step: Callable[[Any, Tensor | None], None],
        monitored: Callable[[str, str], Tensor | None],
    ) -> None:
        """Step the schedulers of a subclass whose turn it is; one that follows a metric waits while that has no value.

        Args:
            interval: ``step`` or ``epoch``, which has just ended.
            number: of that, from 1.
            step: steps one of them, given its metric if it follows one; it reads and sets rates that no guard has
                lowered.
            monitored: gives the value of a metric in this iteration, given its name and who asks.
        """
        for config in self.schedulers:
            if config.interval != interval or number % config.frequency:
                continue
            value: Tensor | None = None
            if config.reduce_on_plateau:
                assert config.monitor is not None
                value = monitored(config.monitor, type(config.scheduler).__name__)
                if value is None:
                    continue
            for group, rate in zip(self._groups, self._scheduled, strict=True):
                group["lr"] = rate
            step(config.scheduler, value)
            self._scheduled = [float(group["lr"]) for group in self._groups]
            self.set(self.lowered)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and, with schedulers, the rates that they have set; as plain types."""
        scheduled = self._scheduled if self.schedulers else []
        return {"taken": dict(self.taken), "scheduled": list(scheduled), "schedulers": len(self.schedulers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._saved, self.taken = dict(state_dict), dict(state_dict["taken"])
