"""Optimization of actor and critic: settings, learning rates, gradients over ranks, and the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NoReturn, cast, get_args

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from lightning_agentrl.agents.checkpoint import guard_checkpoints, last_good_checkpoint
from lightning_agentrl.agents.hooks import Attempt, StepGuard, Verdict
from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.agents.models import Models
from lightning_agentrl.agents.sharding import GradientWatch, GroupedAdamW, is_grouped, prepare_zero
from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.errors import RunStoppedError
from lightning_agentrl.rollout import RolloutSource
from lightning_agentrl.types.plain_config import check_kind

GROUPS = ("actor", "critic")  # names of the parameter groups
Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule of actor or critic over its optimizer steps.

    Skipped steps do not count. For the actor, steps of the critic warm-up do not count either.

    Args:
        shape: course of the rate after the warm-up: ``constant``, ``linear`` decay, or ``cosine`` decay (half a wave).
        warmup_steps: number of steps of linear warm-up; the next step is the first step at the full rate.
        steps: number of steps until the decay ends, warm-up included; null: the length of the run, by
            ``trainer.max_epochs`` or ``trainer.max_steps``.
        final: fraction of the full rate at the end of the decay.
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
        """Return the learning rate of the next step as a fraction of the full rate.

        Args:
            taken: number of steps taken before the next step.
            run: number of steps in the whole run; None: unknown, in which case :attr:`steps` must be set.
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
        actor: schedule that starts at the actor's first step, after the critic warm-up.
        critic: schedule that starts at the first step of the run.
    """

    actor: Schedule = Schedule()
    critic: Schedule = Schedule()

    def __post_init__(self) -> None:
        for name, schedule in self.of.items():
            check_kind(schedule, Schedule, f"model.init_args.optim.schedule.{name}")

    @property
    def of(self) -> dict[str, Schedule]:
        """Schedules by parameter group."""
        return {"actor": self.actor, "critic": self.critic}


@dataclass(frozen=True)
class Optim:
    """Settings of AdamW with two parameter groups, each with its own learning rate and gradient clip.

    Steps with non-finite loss or gradient are skipped.

    Args:
        lr_actor: learning rate of the actor.
        lr_critic: learning rate of the critic.
        weight_decay: weight decay of both groups.
        max_grad_norm_actor: norm to which the actor's gradient is clipped.
        max_grad_norm_critic: norm to which the critic's gradient is clipped.
        max_not_finite: number of consecutive steps with non-finite loss or gradient after which the run stops.
        schedule: learning rate schedules; constant by default.
    """

    lr_actor: float = 1e-6
    lr_critic: float = 1e-5
    weight_decay: float = 0.01
    max_grad_norm_actor: float = 1.0
    max_grad_norm_critic: float = 1.0
    max_not_finite: int = 5
    schedule: Schedules = field(default_factory=Schedules)

    def __post_init__(self) -> None:
        check_kind(self.schedule, Schedules, "model.init_args.optim.schedule")
        for name in ("lr_actor", "lr_critic", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.init_args.optim.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_grad_norm_actor", "max_grad_norm_critic"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.init_args.optim.{name} must be above 0, got {getattr(self, name)}")
        if self.max_not_finite < 1:
            raise ValueError(f"model.init_args.optim.max_not_finite must be at least 1, got {self.max_not_finite}")

    @property
    def rates(self) -> dict[str, float]:
        """Full learning rates by parameter group."""
        return {"actor": self.lr_actor, "critic": self.lr_critic}

    @property
    def limits(self) -> dict[str, float]:
        """Largest gradient norms by parameter group."""
        return {"actor": self.max_grad_norm_actor, "critic": self.max_grad_norm_critic}


def check_schedules(schedules: Schedules, steps: Mapping[str, int | None]) -> None:
    """Refuse schedules without a known end, and warn if a warm-up is longer than the run.

    Args:
        schedules: schedules of both groups.
        steps: number of steps that each group takes in the run; None: unknown.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    for name, schedule in schedules.of.items():
        key, run = f"model.init_args.optim.schedule.{name}", steps[name]
        if run is None:
            if schedule.shape != "constant" and schedule.steps is None:
                raise ValueError(
                    f"{key} falls until the end of the run, and trainer.max_epochs does not give its length; set it, "
                    f"or {key}.steps"
                )
        elif schedule.warmup_steps >= run > 0:
            rank_zero_warn(
                f"{key}.warmup_steps {schedule.warmup_steps} is not below the {run} steps that the {name} takes in "
                "this run, so its full rate is never reached; lower it, or raise trainer.max_epochs"
            )


def prepare_strategy(trainer: L.Trainer) -> None:
    """Make the strategy write checkpoints atomically, and configure DeepSpeed to sum gradients of micro-batches."""
    guard_checkpoints(trainer)
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        prepare_zero(trainer.strategy)


def make_optimizer(
    models: Models, masters: MasterWeights, optim: Optim, zero: bool, sharded: bool
) -> torch.optim.AdamW:
    """Create AdamW with a group ``actor`` and, if there is a critic with trainable weights, a group ``critic``.

    Args:
        models: models to train.
        masters: float32 master weights, which replace 16-bit weights.
        optim: learning rates and weight decay.
        zero: whether DeepSpeed wraps the optimizer.
        sharded: whether FSDP2 shards the weights. With FSDP2, Adam's state is created at once, since distributed
            checkpoints must contain it.
    """
    named: list[tuple[str, nn.Module | None]] = [("actor", models.actor), ("critic", models.critic)]
    groups: list[dict[str, Any]] = [
        {"name": name, "params": masters.of(_trainable(model)), "lr": optim.rates[name]}
        for name, model in named
        if model is not None and (model is models.actor or _trainable(model))
    ]
    kind = GroupedAdamW if zero else torch.optim.AdamW
    optimizer = kind(groups, weight_decay=optim.weight_decay, fused=True)
    if sharded:
        _start_adam(optimizer)
    return optimizer


def _start_adam(optimizer: torch.optim.AdamW) -> None:
    """Create the state that Adam would create at its first step; this does not change its steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def not_stepped_on(
    parameters: Iterable[tuple[str, nn.Parameter]], masters: MasterWeights, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Return the names of the trainable parameters that are in no group of the optimizer."""
    groups = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return [name for name, parameter in trainable if id(masters.of([parameter])[0]) not in groups]


def without_sync(model: nn.Module) -> AbstractContextManager:
    """Prevent DDP from averaging gradients over ranks in backward passes; other strategies are unchanged."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def sync_gradients(
    model: nn.Module,
    optimizer: Any,
    masters: MasterWeights,
    world_size: int,
    backward: Callable[[Tensor], None],
    held: Collection[str] = (),
) -> None:
    """Average the gradients of a step over ranks under DDP; other strategies have done so already.

    One more backward pass of a zero loss that depends on every parameter makes DDP average the gradients. All ranks
    take part, even if their micro-batches left out a frozen actor or all rows. DDP does not handle gradients in master
    weights, so this function averages them, except those of held groups.

    Args:
        model: the model as wrapped by the strategy.
        optimizer: optimizer with the groups of master weights.
        masters: float32 master weights, if any.
        world_size: number of ranks.
        backward: function that runs the backward pass of a loss.
        held: names of the groups that do not change in this step.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if not masters:
        zero = torch.zeros((), device=next(model.parameters()).device)
        backward(sum((0.0 * p.sum() for p in model.parameters() if p.requires_grad), zero))
        return
    moved = [group["params"] for group in optimizer.param_groups if group["name"] not in held]
    for parameter in (p for parameters in moved for p in parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world_size


def clip_by_group(optimizer: Any, limits: Mapping[str, float], held: Collection[str] = ()) -> dict[str, float]:
    """Clip each parameter group by its own norm, and drop the gradients of held groups.

    A held group does not change in the step. With a zero gradient, Adam would still move the group's weights and decay
    their state.

    Args:
        optimizer: optimizer whose parameters have the gradients of a whole mini-batch.
        limits: largest gradient norms by group.
        held: names of the held groups; the same on all ranks.

    Returns:
        Norms before clipping of the groups that have gradients; empty under ZeRO, which clips and drops gradients in
        its step.
    """
    norms = {}
    for group in optimizer.param_groups:
        name = group["name"]
        if is_grouped(optimizer):
            group.update(max_norm=limits[name], held=name in held)
            continue
        if name in held:
            # Use the parameters in the group, since sharded modules may hide their parameters.
            for parameter in group["params"]:
                parameter.grad = None
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            norm = torch.nn.utils.clip_grad_norm_(parameters, limits[name])
            norms[name] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms


def step_or_discard(optimizer: Any, strategy: Strategy, allowed: bool) -> dict[str, float]:
    """Take an optimizer step, or discard the gradients.

    Args:
        optimizer: Lightning's wrapper of the optimizer, with clipped gradients.
        strategy: strategy of the trainer.
        allowed: whether to step; the same on all ranks.

    Returns:
        Norms before clipping by group, which ZeRO computes in its step; empty for other strategies.
    """
    if allowed:
        optimizer.step()
    if not is_grouped(optimizer):
        return {}
    if not allowed:
        # ZeRO drops gradients only in a step. This step changes no weights, and Lightning does not count it.
        for group in optimizer.param_groups:
            group["held"] = True
        strategy.optimizer_step(optimizer.optimizer, lambda: None)
    return {group["name"]: group["grad_norm"] for group in optimizer.param_groups if not group["held"]}


class ScheduleLR(LambdaLR):
    """The scheduler for ``optim.schedule``; its own class distinguishes it from schedulers of subclasses."""


class Steps:
    """Counts and learning rates of a run's optimizer steps, and the decision whether to take a step.

    Learning rates are those of the scheduler times the factors of guards. Only :meth:`write_rates` sets them in the
    optimizer.

    Args:
        optim: learning rates, schedules and limits.
    """

    def __init__(self, optim: Optim) -> None:
        self.optim = optim
        self.attempts = 0
        self.skipped = 0  # number of skipped attempts since the first start of the run
        self.warmup = 0  # steps taken while the actor was held
        self.not_finite = 0  # consecutive attempts with non-finite loss or gradient, up to now
        self.masters = MasterWeights((), {})
        self.saved_weights: Mapping[str, Tensor] = {}  # weights of a checkpoint, until the optimizer is created
        self.gradient_watch: GradientWatch | None = None  # under ZeRO only
        self.follows_schedule = True  # whether configure_optimizers returned the scheduler of `optim.schedule`
        self._configured: list[dict[str, Any]] = []  # rate and decay of each group before a checkpoint is loaded
        self._rates: Sequence[Any] = ()  # rates of the groups, without the factors of guards

    def begin_anew(self) -> None:
        """Reset the counts of an earlier run. Attempts continue, since turns record them as the policy version."""
        self.skipped = self.warmup = self.not_finite = 0

    def configure(self, agent: Any) -> dict[str, Any]:
        """Create the optimizer and scheduler of an agent, replacing those of an earlier run.

        Args:
            agent: an ``Agent`` with models, attached to a trainer.
        """
        kept = self.masters.release(agent.named_parameters())
        self.masters = MasterWeights(agent.named_parameters(), self.saved_weights or kept)
        self.saved_weights = {}
        zero = isinstance(agent.trainer.strategy, DeepSpeedStrategy)
        if self.gradient_watch is not None:
            self.gradient_watch.release()
        self.gradient_watch = GradientWatch(p for p in agent.parameters() if p.requires_grad) if zero else None
        optimizer = make_optimizer(agent.models, self.masters, self.optim, zero, sharded=agent.device_mesh is not None)
        scheduler = self.make_scheduler(optimizer, agent.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def make_scheduler(self, optimizer: torch.optim.Optimizer, trainer: L.Trainer) -> LambdaLR:
        """Return the scheduler of both groups, to be stepped once per optimizer step taken."""
        schedule, run = self.optim.schedule, planned_steps(trainer)

        def actor(step: int) -> float:
            return schedule.actor.share(step - self.warmup, run["actor"])

        def critic(step: int) -> float:
            return schedule.critic.share(step, run["critic"])

        lambdas = {"actor": actor, "critic": critic}
        return ScheduleLR(optimizer, [lambdas[group["name"]] for group in optimizer.param_groups])

    def check_optimizer(self, trainer: L.Trainer) -> None:
        """Check the result of ``configure_optimizers``, and record its rates and decay, before states are loaded.

        Raises:
            ValueError: the optimizer has unexpected groups, or learning rates are set twice.
        """
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        names = [group.get("name") for group in groups]
        if len(trainer.optimizers) != 1 or len({*names}) != len(names) or not {*names} <= {*GROUPS}:
            raise ValueError(
                f"configure_optimizers must return one optimizer whose groups are named actor and critic, got {names}; "
                "begin with the optimizer of super().configure_optimizers()"
            )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        if len(schedulers) > 1:
            raise ValueError(
                f"configure_optimizers returns {len(schedulers)} schedulers; join them with "
                "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
            )
        self.follows_schedule = any(isinstance(scheduler, ScheduleLR) for scheduler in schedulers)
        if not self.follows_schedule and self.optim.schedule != Schedules():
            raise ValueError(
                "configure_optimizers sets the learning rates, and model.init_args.optim.schedule would set them too; "
                "return the scheduler of super().configure_optimizers(), or remove the schedule"
            )
        # A scheduler has already changed `lr`, and stored the full rate as `initial_lr`.
        self._configured = [
            {"lr": group.get("initial_lr", group["lr"]), "weight_decay": group.get("weight_decay")} for group in groups
        ]

    def begin(self, agent: L.LightningModule) -> None:
        """Attach master weights to the optimizer; set rates and weight decay from the configuration, also on resuming.

        Args:
            agent: an ``Agent`` whose checkpoint, if any, was loaded.
        """
        trainer = agent.trainer
        self.masters.attach(optimizer := trainer.optimizers[0])  # a subclass may have created the optimizer
        zero = isinstance(trainer.strategy, DeepSpeedStrategy)  # DeepSpeed's optimizer holds copies of the parameters
        if left := [] if zero else not_stepped_on(agent.named_parameters(), self.masters, optimizer):
            rank_zero_warn(
                f"{len(left)} of the agent's parameters are in no group of the optimizer and are not trained, such as "
                f"{left[0]}; add them in configure_optimizers, or call requires_grad_(False)"
            )
        groups = trainer.optimizers[0].param_groups
        before = [dict(group) for group in groups]
        self._rates = [configured["lr"] for configured in self._configured]
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(scheduler, LambdaLR):  # use the configured rates instead of those in the checkpoint
                scheduler.base_lrs = list(self._rates)
                factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
                self._rates = [rate * factor for rate, factor in zip(self._rates, factors, strict=True)]
            else:
                self._rates = scheduler.get_last_lr()
        for group, configured in zip(groups, self._configured, strict=True):
            if configured["weight_decay"] is not None:
                group["weight_decay"] = configured["weight_decay"]
        self.write_rates(trainer)
        self._end_at_max_steps(trainer)
        for old, group in zip(before, groups, strict=True):
            for key in ("lr", "weight_decay"):
                if key in group and group[key] != old[key]:
                    rank_zero_info(f"{key} of the {group['name']}: {group[key]}, in the checkpoint it was {old[key]}")

    def write_rates(self, trainer: L.Trainer, guarded: bool = True) -> None:
        """Set the learning rates of the next step in the optimizer, with the factors of guards if ``guarded``."""
        lowered = math.prod(guard.lowered for guard in _guards(trainer)) if guarded else 1.0
        for group, rate in zip(trainer.optimizers[0].param_groups, self._rates, strict=True):
            group["lr"] = rate * lowered

    def step_scheduler(self, agent: L.LightningModule, interval: str, number: int) -> None:
        """Step the scheduler by the agent's ``lr_scheduler_step`` if it is due.

        Args:
            agent: an ``Agent`` attached to a trainer.
            interval: unit that has just ended: ``step`` or ``epoch``.
            number: index of this step or epoch, counted from 1.
        """
        trainer = agent.trainer
        for config in trainer.lr_scheduler_configs:
            if config.interval == interval and number % config.frequency == 0:
                self.write_rates(
                    trainer, guarded=False
                )  # a scheduler that multiplies the current rate must not read the factors of guards
                agent.lr_scheduler_step(config.scheduler, None)
                self._rates = config.scheduler.get_last_lr()
                self.write_rates(trainer)

    def allow(self, trainer: L.Trainer, attempt: Attempt, fault: str) -> bool:
        """Check that loss and gradient are finite, call the guards, and return whether to step, the same on all ranks.

        No other code skips steps.

        Args:
            trainer: trainer of the run.
            attempt: the step that is about to be taken.
            fault: description of a non-finite loss on this rank; empty if the loss is finite.

        Raises:
            RunStoppedError: on all ranks, if a guard stops the run, or after too many consecutive non-finite steps.
        """
        verdict, reason = self.judge(fault, attempt.norms)
        if verdict is Verdict.STEP and (guards := _guards(trainer)):
            # The most severe verdict applies; among equal verdicts, the one of the first guard on the lowest rank.
            own = max((guard.before_step(trainer, attempt) for guard in guards), key=itemgetter(0))
            verdict, reason = max(all_gather(own), key=itemgetter(0))
        if verdict is Verdict.STOP:
            stop_run(trainer, f"stopped before optimizer step {attempt.number + 1}: {reason}")
        if verdict is Verdict.SKIP:
            rank_zero_warn(f"optimizer step {attempt.number + 1} is skipped: {reason}")
            return False
        self.write_rates(trainer)
        return True

    def judge(self, fault: str, norms: Mapping[str, float]) -> tuple[Verdict, str]:
        """Return a verdict on whether loss and gradient are finite, with a reason if not; every rank must call this.

        Args:
            fault: description of a non-finite loss on this rank, with its turns; empty if the loss is finite.
            norms: norms of the whole gradient by group, as far as they are known.
        """
        wrong = [f"the gradient of the {name} has the norm {x}" for name, x in norms.items() if not math.isfinite(x)]
        parts = all_gather((fault, ", ".join(wrong)))
        reason = "; ".join([own for own, _ in parts if own]) or next((norm for _, norm in parts if norm), "")
        self.not_finite = self.not_finite + 1 if reason else 0
        if self.not_finite >= self.optim.max_not_finite:
            return Verdict.STOP, f"{reason}, in {self.not_finite} steps in a row (model.init_args.optim.max_not_finite)"
        return (Verdict.SKIP, reason) if reason else (Verdict.STEP, "")

    def count(self, agent: L.LightningModule, held: Collection[str], taken: bool) -> None:
        """Count an attempt and, if the step was taken, step the scheduler.

        Args:
            agent: an ``Agent`` attached to a trainer.
            held: names of the groups that do not change in this phase.
            taken: whether a step was taken.
        """
        self.attempts += 1
        if taken:
            self.warmup += "actor" in held
            self.step_scheduler(agent, "step", agent.trainer.global_step)
        else:
            self.skipped += 1
        self._end_at_max_steps(agent.trainer)

    def _end_at_max_steps(self, trainer: L.Trainer) -> None:
        """Stop after ``max_steps`` attempts: Lightning counts only steps taken, and would start another iteration."""
        if self.skipped and 0 < trainer.max_steps <= trainer.global_step + self.skipped:
            trainer.should_stop = True

    def held(self, trainer: L.Trainer) -> range:
        """Return the indices of this run's attempts in which the actor does not change."""
        began = self.attempts - self.skipped - trainer.global_step
        return range(began, began + held_steps(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries for a checkpoint."""
        return {
            "attempts": self.attempts,
            "skipped": self.skipped,  # DeepSpeed removes the name skipped_steps from what it loads
            "warmup_steps": self.warmup,
            "not_finite_in_a_row": self.not_finite,
        }

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the entries of a checkpoint."""
        self.attempts, self.skipped = checkpoint["attempts"], checkpoint["skipped"]
        self.warmup, self.not_finite = checkpoint["warmup_steps"], checkpoint["not_finite_in_a_row"]


def planned_steps(trainer: L.Trainer) -> dict[str, int | None]:
    """Return the number of steps that each group takes in the whole run if none is skipped; None if unknown."""
    epochs, steps = trainer.max_epochs or -1, trainer.max_steps
    per_iteration = cast(Any, trainer).datamodule.steps_per_iteration
    every = min((n for n in (epochs * per_iteration, steps) if n > 0), default=None)
    return {"actor": None if every is None else max(every - held_steps(trainer), 0), "critic": every}


def held_steps(trainer: L.Trainer) -> int:
    """Return the number of steps at the start of the run in which the actor does not change."""
    warmups = (c.warmup_iterations for c in cast(Any, trainer).callbacks if isinstance(c, RolloutSource))
    return cast(Any, trainer).datamodule.steps_per_iteration * sum(warmups)


def stop_run(trainer: L.Trainer, reason: str) -> NoReturn:
    """Stop the run on all ranks; every rank must call this function.

    Raises:
        RunStoppedError: always; contains the reason and the last good checkpoint.
    """
    with raise_once():
        raise RunStoppedError(reason, last_good_checkpoint(trainer))
    raise AssertionError


def _guards(trainer: L.Trainer) -> list[StepGuard]:
    return [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, StepGuard)]
