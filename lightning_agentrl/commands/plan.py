"""What a run would do: sizes, memory and one prompt, printed by `agentrl fit --dry-run` once everything is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.optim import Schedule, planned_steps
from lightning_agentrl.agents.sharding import in_lockstep
from lightning_agentrl.callbacks import CriticWarmup, RunSummary
from lightning_agentrl.callbacks.run_folder import count_parameters
from lightning_agentrl.commands.memory import Rows, free_memory, memory_plan, suggested_budget
from lightning_agentrl.episodes.prompt_check import prompt_parts
from lightning_agentrl.models.prefix_tree import Keys, shared_length
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout import RolloutDataModule, Session, ValidationConfig
from lightning_agentrl.rollout.collector import Collector, endless_session
from lightning_agentrl.rollout.groups import group_session
from lightning_agentrl.types import ModelInput, Row


class PlanShown(Exception):
    """The end of a dry run, raised after the plan so that nothing is trained."""


class DryRun(L.Callback):
    """The plan of a run, printed in place of its start."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero or in_lockstep(trainer.strategy):  # sharded models are measured by all ranks
            text = plan_text(trainer, cast(Agent, pl_module))
            rank_zero_only(print)(text, flush=True)
        raise PlanShown


MOST_PROMPTS = 16  # that are looked at before a run


def plan_text(trainer: L.Trainer, agent: Agent) -> str:
    """Return the plan as readable text."""
    data = agent.datamodule
    prompts = first_prompts(data.collector)
    of_step = step_rows(trainer, data, prompts)
    memory = memory_plan(agent, data, of_step)
    suggested = suggested_budget(agent, memory, of_step, free_memory(agent.device))
    sections = {
        "models": _models(agent),
        "an iteration": _iteration(trainer, agent, data, prompts),
        "the run": [*_run(trainer, data), *_rates(trainer, agent)],
        "memory of one process": [*memory.lines(), *suggested],
    }
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines = []
    for title, rows in sections.items():
        lines += ["", f"{title}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
    with first_session(data.collector) as session:
        parts = prompt_parts(session, data.player.renderer)
    counts = ", ".join(f"{name} {count}" for name, count in parts.items() if count)
    text = shown(agent.tokenizer, prompts[0])
    lines += ["", f"one prompt: {len(prompts[0])} tokens ({counts})", *(f"  | {line}" for line in text.splitlines())]
    return "\n".join(lines[1:])


def first_prompts(collector: Collector) -> list[ModelInput]:
    """Return the first prompts of some training environments of this rank."""
    prompts = []
    groups = collector.sizes.groups
    step = 1 if groups is None else groups.size  # all episodes of a group begin alike
    for index in collector.sizes.own_envs(collector.rank, collector.world)[: MOST_PROMPTS * step : step]:
        with first_session(collector, index) as session:
            prompts.append(session.prompt().input)
    return prompts


@contextmanager
def first_session(collector: Collector, index: int = 0) -> Iterator[Session]:
    """Yield a session at the start of its first training episode, apart from those that are trained on."""
    player, groups = collector.player, collector.sizes.groups
    if groups is None:
        kind, session = player.pool.kind(index), endless_session(player, index)
    else:
        group, member = divmod(index, groups.size)
        kind, session = player.pool.kind(group), group_session(player, groups, group, member)
    session.begin()
    try:
        yield session
    finally:
        player.pool.give_back(kind, session.worker)


def _models(agent: Agent) -> Rows:
    config = agent.actor.lm.config
    rows = [("actor", f"{agent.model}, {config.model_type}, {_trained(agent.actor)}")]
    if agent.critic is not None:
        kind = type(agent.critic).__name__.removeprefix("FSDP")  # sharding renames classes
        rows.append(("critic", f"{kind}, {_trained(agent.critic)}"))
    return [*rows, ("reference", reference_text(agent))]


def reference_text(agent: Agent) -> str:
    """Return in words what log-probs are compared with, if anything."""
    if not agent.needs.ref_logps:
        return "none"
    if agent.reference != agent.model:
        return f"{agent.reference}, frozen"
    return "frozen copy of the initial policy" if agent.lora is None else "the frozen model below the adapters"


def _trained(module: torch.nn.Module) -> str:
    every, trained = count_parameters(module), count_parameters(module, trained=True)
    return f"{every:,} parameters" + ("" if every == trained else f", {trained:,} of them trained")


def _iteration(trainer: L.Trainer, agent: Agent, data: RolloutDataModule, prompts: Sequence[ModelInput]) -> Rows:
    several = trainer.world_size > 1
    at_a_time = data.sizes.at_a_time(trainer.world_size)
    per_process = f", {at_a_time} environments on each of {trainer.world_size} processes" if several else ""
    rows = step_rows(trainer, data, prompts)
    turns, micro_batches = len(rows), agent.reader.micro_batches(rows)
    return [
        *_sizes(data, per_process),
        (
            "micro-batches",
            f"about {len(micro_batches)} of {math.ceil(turns / len(micro_batches))} turns in each step, at most "
            f"{agent.compute.max_tokens_per_micro_batch} tokens" + _growth(data),
        ),
        ("prompts", f"{_range([len(prompt) for prompt in prompts])} tokens at the start of an episode"),
        ("replies", f"at most {data.interaction.max_reply_tokens} tokens"),
    ]


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _sizes(data: RolloutDataModule, per_process: str) -> Rows:
    sizes, groups, ahead = data.sizes, data.groups, []
    if data.max_staleness:
        ahead = [("collected", f"while the previous one trains; turns at most {data.max_staleness} iterations old")]
    if groups is None:
        turns = f"{sizes.num_envs} environments * {sizes.turns_per_env} turns = {sizes.turns_per_rollout}{per_process}"
        steps = f"{sizes.steps_per_iteration}, each on {sizes.mini_batch_turns} turns"
        return [("turns", turns), *ahead, ("optimizer steps", steps)]
    episodes = f"{groups.per_rollout} groups * {groups.size} = {groups.episodes}, of as many turns as they take"
    return [
        ("episodes", episodes),
        ("at a time", f"{sizes.num_envs} environments{per_process}"),
        *ahead,
        ("optimizer steps", f"{sizes.steps_per_iteration}, each on a share of 1/{groups.mini_batches} of the turns"),
    ]


def _growth(data: RolloutDataModule) -> str:
    if data.groups is not None:
        return "; more where episodes have more than one turn"
    return ", fewer as episodes grow" if data.memory.grows else ""


def step_turns(data: RolloutDataModule, world: int) -> int:
    """Return the turns of an optimizer step on each process; with groups the fewest possible, one per episode."""
    turns = (
        data.sizes.mini_batch_turns
        if data.groups is None
        else math.ceil(data.groups.episodes / data.sizes.mini_batches)
    )
    return math.ceil(turns / world)


def _run(trainer: L.Trainer, data: RolloutDataModule) -> Rows:
    warmup = sum(c.warmup_iterations for c in cast(Any, trainer).callbacks if isinstance(c, CriticWarmup))
    epochs = data.planned_iterations
    done = f", {trainer.current_epoch} of them done" if trainer.current_epoch else ""
    rows = [("epochs", ("no limit" if epochs is None else str(epochs)) + done)]
    if warmup:
        rows.append(("critic warm-up", f"{warmup} epochs, in which only the critic learns"))
    if epochs is not None:
        left = max(epochs - warmup, 0)
        note = "" if left else "; the actor would never be trained, raise trainer.max_epochs"
        groups = data.groups
        size = f"{left * (data.sizes.turns_per_rollout if groups is None else groups.episodes):,}"
        rows.append(("iterations of training", f"{left}, {size} {data.sizes.unit}{note}"))
    if data.validation.episodes:
        rows.append(("held-out episodes", held_out_plays(trainer, data.validation, epochs)))
    return rows


def _rates(trainer: L.Trainer, agent: Agent) -> Rows:
    full, name = agent.optim.rates, "learning rate of the"
    if not agent.steps.follows_schedule:
        return [("learning rates", "by what configure_optimizers returns")]
    trained = agent.critic is not None and not agent.critic.fitted
    groups = [group for group in full if group == "actor" or trained]
    steps, schedules = planned_steps(trainer), agent.optim.schedule.of
    return [(f"{name} {group}", rate_text(schedules[group], full[group], steps[group])) for group in groups]


def rate_text(schedule: Schedule, full: float, run: int | None) -> str:
    """Return in words how a learning rate changes over the steps of its group.

    Args:
        schedule: of the group.
        full: the rate that is configured.
        run: steps that the group takes in the run; None: not known.
    """
    text = f"rises over {schedule.warmup_steps} steps to {full:g}" if schedule.warmup_steps else f"{full:g}"
    if run is not None and 0 < run <= schedule.warmup_steps:
        return f"{text}, and the run ends after {run}"
    if schedule.shape == "constant":
        return text
    along = "a line" if schedule.shape == "linear" else "half a cosine wave"
    last = schedule.steps or run
    of = f", and the run has {run}" if run not in (None, last) else ""
    return f"{text}, falls along {along} to {schedule.final * full:g} by step {last}{of}"


def held_out_plays(trainer: L.Trainer, validation: ValidationConfig, epochs: int | None) -> str:
    """Return when held-out episodes are played: at validations, and before and after the run for its summary.

    Where a run goes on from a checkpoint, those that it has played are left out.
    """
    summaries = [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, RunSummary)]
    before, after = any(summary.before is None for summary in summaries), bool(summaries)
    given = trainer.check_val_every_n_epoch if validation.every is None else validation.every
    often = epochs if validation.every is None and given == 1 else given
    episodes, often = validation.episodes, often if trainer.limit_val_batches else 0
    between = 0 if epochs is None or not often else epochs // often - trainer.current_epoch // often
    parts = ["before the run"] if before else []
    when = "after the last epoch" if often == epochs else f"after every {often} epochs"
    parts += [when] if between or (often and epochs is None) else []
    parts += ["after it"] if after else []
    if not parts:
        return "none"
    total = "" if epochs is None else f"; {episodes * (between + before + after):,} in all"
    return f"{episodes} {' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)}{total}"


def step_rows(trainer: L.Trainer, data: RolloutDataModule, prompts: Sequence[ModelInput]) -> list[Row]:
    """Return rows of an optimizer step on one process, with replies of full length."""
    return example_rows(prompts, step_turns(data, trainer.world_size), data)


def example_rows(prompts: Sequence[ModelInput], turns: int, data: RolloutDataModule) -> list[Row]:
    """Return ``turns`` different rows with the given prompts and replies of full length.

    Where there are more rows than prompts, text prompts part where a given one parts from the most similar of the
    others, since later turns are about as similar.
    """
    reply = data.interaction.max_reply_tokens
    partings = _partings([prompt.keys for prompt in prompts])
    rows = []
    for i in range(turns):
        prompt, parting = prompts[i % len(prompts)], partings[i % len(prompts)]
        if i >= len(prompts) > 1 and not prompt.images and len(prompt) > parting:
            prompt = prompt.head(parting) + ModelInput.of_ids((i, *([0] * (len(prompt) - parting - 1))))
        row = prompt + ModelInput.of_ids((i, *([0] * (reply - 1))))
        rows.append(Row(row, tuple(range(len(prompt) - 1, len(row) - 1))))
    return rows


def _partings(rows: Sequence[Keys]) -> list[int]:
    """Return for each row how long a prefix it shares with the most similar of the different ones.

    Where all are equal, that is all of it: nothing tells where they part.
    """
    different = sorted(set(rows))  # the most similar one is a neighbour
    shared = [shared_length(*pair) for pair in pairwise(different)]
    longest = [max(sides) for sides in zip([0, *shared], [*shared, 0], strict=True)]
    partings = dict(zip(different, longest, strict=True)) if shared else {}
    return [partings.get(row, len(row)) for row in rows]
