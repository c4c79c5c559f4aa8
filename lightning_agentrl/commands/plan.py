"""Plan of a run, printed by `agentrl fit --dry-run`: sizes, memory and one prompt, without weights or a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.checkpoint import main_file
from lightning_agentrl.agents.checks import check_run
from lightning_agentrl.agents.models import Models, build_models, readers_for
from lightning_agentrl.agents.optim import Schedule, planned_steps
from lightning_agentrl.agents.trial import try_own_parts
from lightning_agentrl.callbacks import CriticWarmup, RunSummary
from lightning_agentrl.callbacks.run_folder import count_parameters
from lightning_agentrl.commands.memory import (
    MemoryPlan,
    Place,
    Rows,
    Sharing,
    Step,
    activation_bytes,
    budget_text,
    memory_plan,
    size_text,
    turn_bytes,
)
from lightning_agentrl.engines.base import PlannedPolicy
from lightning_agentrl.episodes.prompt_check import prompt_parts
from lightning_agentrl.models.allocator import resident_bytes
from lightning_agentrl.models.loading import context_length_of
from lightning_agentrl.models.packing import pack, plan_micro_batches
from lightning_agentrl.models.prefix_tree import Keys, shared_length
from lightning_agentrl.models.shapes import empty_causal_lm, shape_of
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule, Session, ValidationConfig
from lightning_agentrl.rollout.collector import endless_session
from lightning_agentrl.rollout.groups import group_session
from lightning_agentrl.types import ModelInput, Row

GPU = ("gpu", "cuda")  # values of trainer.accelerator


def planned_trainer(given: Any) -> tuple[Place, dict[str, Any]]:
    """Return the devices of a run, and the Trainer arguments to replace on a machine without these devices.

    Args:
        given: arguments of the Trainer by name; `strategy` may be an object.
    """
    accelerator, devices = given["accelerator"], given["devices"]
    on_gpu = accelerator in GPU or (accelerator == "auto" and torch.cuda.is_available())
    if devices in ("auto", -1, "-1"):
        devices = max(torch.cuda.device_count(), 1) if on_gpu else 1
    elif isinstance(devices, str) and "," in devices:
        devices = devices.strip(",").split(",")
    devices, nodes = len(devices) if isinstance(devices, list) else int(devices), int(given["num_nodes"] or 1)
    strategy, instead = given["strategy"], dict[str, Any]()
    stage = (strategy.config or {})["zero_optimization"]["stage"] if isinstance(strategy, DeepSpeedStrategy) else None
    if isinstance(strategy, str) and strategy.startswith("deepspeed"):
        stage = int(strategy[-1]) if strategy[-1].isdigit() else 2  # Lightning's default
    if stage in (1, 2):  # replace DeepSpeed, since a Trainer with DeepSpeed requires a GPU
        instead["strategy"] = "ddp"
    if accelerator in (*GPU, "auto"):
        instead |= {"accelerator": "cpu", "devices": devices}
    sharing = cast(Sharing, f"zero{stage}" if stage in (1, 2) else "")
    return Place(on_gpu, devices * nodes, nodes, sharing, str(given["precision"] or "32-true")), instead


def sharing_of(strategy: Strategy) -> Sharing:
    """Return the kind of sharding or data parallelism of a strategy, except ZeRO, which `planned_trainer` handles."""
    if isinstance(strategy, ModelParallelStrategy):
        return "fsdp2"
    return "ddp" if isinstance(strategy, DDPStrategy) else ""


class RunPlan:
    """Plan of a run, made without loading weights or starting processes or an engine. Close the plan after use.

    Args:
        trainer: trainer of the run; its accelerator does not matter.
        agent: agent to train.
        data: data module of the run.
        place: devices of the run; None: the trainer's processes and nodes, on CPUs.
        checkpoint: checkpoint from which the run continues.

    Raises:
        ValueError: the config has a fault that would also stop the run at its start.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        agent: Agent,
        data: RolloutDataModule,
        place: Place | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        place = place or Place(False, trainer.num_devices * trainer.num_nodes, trainer.num_nodes)
        self.place = replace(place, sharing=place.sharing or sharing_of(trainer.strategy), precision=trainer.precision)
        self.trainer, self.agent, self.data = trainer, agent, data
        cast(Any, trainer).datamodule = data
        agent.trainer = data.trainer = trainer
        if checkpoint:
            _take_progress(trainer, Path(checkpoint))
        config, self.shape_known = shape_of(agent.model)
        context = context_length_of(config.get_text_config(), agent.model)
        check_run(agent, "fit", self.place.on_gpu)
        self.tried = try_own_parts(agent)
        data.sizes.check_processes(self.place.processes)
        self.prompts: list[ModelInput] = []
        self.reader = None
        for source in data.pool.sources:
            if isinstance(source, EnvConfig):
                source.check_id()
        if self.shape_known:  # without the hub, tokenizer and data sets may be missing
            data.pool.make_one_of_each()
            self.tokenizer, self.reader, context = readers_for(agent)
            data.check(self.tokenizer, context, self.reader)
            self.prompts = first_prompts(data, self.place.processes)
        with trainer.strategy.precision_plugin.module_init_context(), torch.device("meta"):
            self.models = self._build()
        self.policy = PlannedPolicy(
            self.models.actor,
            self.place.on_gpu,
            self.place.computes_in,
            min(context, data.longest_turn),
            data.max_staleness > 0,
        )
        self.rows = self._rows()
        self.step = self._step()
        self.memory = self._memory()

    def close(self) -> None:
        """Close the environments of the plan."""
        self.data.teardown("fit")

    def _build(self) -> Models:
        agent = self.agent
        compute = replace(agent.compute, kernels="torch")
        reference = agent.reference if agent.needs.ref_logps else None
        rounding = None if self.place.shards > 1 and agent.lora is None else self.place.precision
        tower = agent.train_tower
        return build_models(
            agent.model, agent.critic, reference, agent.lora, compute, rounding, None, tower, load=empty_causal_lm
        )

    def _rows(self) -> list[Row]:
        """Return example rows of an optimizer step, with replies of full length; empty without a tokenizer.

        The rows are for one process, or for all processes of a sequence-parallel group.
        """
        turns = step_turns(self.data, self.place.processes) * self.agent.compute.sequence_parallel
        return example_rows(self.prompts, turns, self.data) if self.prompts else []

    def _step(self) -> Step:
        """Return the size of an optimizer step on one process.

        With sequence parallelism a process has a share of all tokens, but possibly all reply tokens.
        """
        compute, reply = self.agent.compute, self.data.interaction.max_reply_tokens
        parts = compute.sequence_parallel
        budget = parts * compute.max_tokens_per_micro_batch
        if not self.rows:  # without rows, assume turns of maximal length without common prefixes
            turns, longest = step_turns(self.data, self.place.processes) * parts, self.data.longest_turn
            fitting = max(budget // longest, 1)
            tokens, reads = min(turns, fitting) * longest, min(turns, fitting) * reply
            return Step(math.ceil(turns / fitting), max(tokens, longest) // parts, reads, turns * longest // parts)
        per_token = self.reader.patches_per_token if self.reader else 0
        share = self.models.share_prefixes
        plans = plan_micro_batches(self.rows, budget, share, per_token)
        batches = [[self.rows[i] for i in index] for index in plans]
        sizes = [pack(rows, share=share, reader=self.reader).tokens for rows in batches]
        most_reads = max(sum(len(row.logit_positions) for row in rows) for rows in batches)
        # Other rows of the run may fill the budget, and a single row may exceed the budget.
        largest = max([*sizes, *[budget] * (len(plans) > 1)])
        return Step(len(plans), math.ceil(largest / parts), most_reads, sum(sizes) // parts)

    def _memory(self) -> MemoryPlan:
        """Return the memory of one process."""
        at_a_time = self.data.sizes.at_a_time(self.place.processes)
        args = self.models, self.agent.compute, self.place, self.step
        program = 0 if self.place.on_gpu else resident_bytes()
        return memory_plan(
            *args, self.data.engine.memory(self.policy, at_a_time), self.data.engine.sends_layers, program
        )

    # Methods for sections of the text

    def text(self) -> str:
        """Return the plan as readable text."""
        sections = {
            "models": self._models(),
            "an iteration": self._iteration(),
            "the run": [*_run(self.trainer, self.data), *_rates(self.trainer, self.agent)],
            "memory of one process": [*self.memory.lines(), *self._fitting(), *self._warmup()],
        }
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        lines = []
        for title, rows in sections.items():
            lines += ["", f"{title}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
        return "\n".join([*lines[1:], "", *self._prompt()])

    def _prompt(self) -> list[str]:
        if not self.prompts:
            return [
                f"no prompt is shown: the tokenizer of {self.agent.model} is not in the cache, and the hub cannot",
                "be reached. Sizes are from the table of shipped configs, and all turns have their maximal length.",
            ]
        with first_session(self.data) as session:
            parts = prompt_parts(session, self.data.player.renderer)
        counts = ", ".join(f"{name} {count}" for name, count in parts.items() if count)
        text = shown(self.tokenizer, self.prompts[0])
        return [f"one prompt: {len(self.prompts[0])} tokens ({counts})", *(f"  | {line}" for line in text.splitlines())]

    def _models(self) -> Rows:
        agent, models = self.agent, self.models
        config = models.actor.lm.config
        rows = [("actor", f"{agent.model}, {config.model_type}, {_trained(models.actor)}")]
        if models.critic is not None:
            rows.append(("critic", f"{type(models.critic).__name__}, {_trained(models.critic)}"))
        rows.append(("reference", reference_text(agent)))
        return [*rows, ("tested", f"{', '.join(self.tried)}, on a rollout of random numbers")] if self.tried else rows

    def _iteration(self) -> Rows:
        data, world = self.data, self.place.processes
        at_a_time = data.sizes.at_a_time(world)
        per_process = f", {at_a_time} environments on each of {world} processes" if world > 1 else ""
        turns, count = step_turns(data, world), self.step.micro_batches
        lengths = [len(prompt) for prompt in self.prompts]
        prompts = f"{_range(lengths)} tokens at the start of an episode, " if lengths else ""
        return [
            *_sizes(data, per_process),
            (
                "micro-batches",
                f"about {count} of {math.ceil(turns / count)} turns in each step, at most "
                f"{self.agent.compute.max_tokens_per_micro_batch} tokens" + _growth(data),
            ),
            ("prompts", f"{prompts}at most {data.prompt.max_prompt_tokens}"),
            ("replies", f"at most {data.interaction.max_reply_tokens} tokens"),
        ]

    def _fitting(self) -> Rows:
        """Return rows about fitting GPUs and token budgets, and about a node's main memory while models are loaded."""
        if not self.place.on_gpu:
            return []
        here = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        size = self.memory.smallest_gpu
        fits = f"GPUs of {size} GB" if size else "more than any common GPU; shard over more GPUs, or train adapters"
        gpu = here or (size or 0) * 10**9
        rows = [("needs", fits)]
        if gpu:
            compute, models, step = self.agent.compute, self.models, self.step

            def peak(budget: int) -> int:
                reads = max(step.reads * budget // step.tokens, 1)
                activations = activation_bytes(models, compute, self.place, budget, reads)
                return max(replace(self.memory, activations=activations).peaks(gpu))

            rows.append(("micro-batch budget", budget_text(peak, compute.max_tokens_per_micro_batch, step.total, gpu)))
        whole = 4 * sum(p.numel() for p in self.models.actor.parameters())
        node = whole * self.place.processes // self.place.nodes
        return [*rows, ("main memory of a node", f"{size_text(node)} while models are loaded")]

    def _warmup(self) -> Rows:
        """Return a row about the main memory of a critic warm-up, which stores its rollouts as token ids."""
        rows, data = [], self.data
        for callback in cast(Any, self.trainer).callbacks:
            if isinstance(callback, CriticWarmup) and data.groups is None:
                turns = callback.rollouts * data.sizes.turns_per_rollout // self.place.processes
                size = turns * turn_bytes(data.prompt.max_prompt_tokens, data.interaction.max_reply_tokens)
                text = f"{turns:,} turns as token ids, at most {size_text(size)} of main memory"
                rows.append(("critic warm-up keeps", text))
        return rows


def _take_progress(trainer: L.Trainer, checkpoint: Path) -> None:
    """Set the progress of a trainer and its summary to the progress of a checkpoint."""
    saved = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)
    counts = saved["loops"]["fit_loop"]["epoch_progress"]["current"]
    trainer.fit_loop.epoch_progress.current.completed = counts["ready"]
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, RunSummary) and callback.state_key in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][callback.state_key])


MOST_PROMPTS = 16  # largest number of prompts to render for a plan


def first_prompts(data: RolloutDataModule, world: int = 1) -> list[ModelInput]:
    """Return the first prompts of up to ``MOST_PROMPTS`` training environments of rank 0."""
    prompts = []
    groups = data.sizes.groups
    step = 1 if groups is None else groups.size  # all episodes of a group start with the same prompt
    for index in data.sizes.own_envs(0, world)[: MOST_PROMPTS * step : step]:
        with first_session(data, index) as session:
            prompts.append(session.prompt().input)
    return prompts


@contextmanager
def first_session(data: RolloutDataModule, index: int = 0) -> Iterator[Session]:
    """Yield a separate session at the start of the session's first training episode."""
    player, groups = data.player, data.sizes.groups
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


def reference_text(agent: Agent) -> str:
    """Return a description of the reference policy, or `none`."""
    if not agent.needs.ref_logps:
        return "none"
    if agent.reference != agent.model:
        return f"{agent.reference}, frozen"
    return "frozen copy of the initial policy" if agent.lora is None else "frozen base model without the adapters"


def _trained(module: torch.nn.Module) -> str:
    every, trained = count_parameters(module), count_parameters(module, trained=True)
    return f"{every:,} parameters" + ("" if every == trained else f", {trained:,} of them trained")


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
    episodes = f"{groups.per_rollout} groups * {groups.size} = {groups.episodes}, each played to its end"
    return [
        ("episodes", episodes),
        ("at a time", f"{sizes.num_envs} environments{per_process}"),
        *ahead,
        ("optimizer steps", f"{sizes.steps_per_iteration}, each on a share of 1/{groups.mini_batches} of the turns"),
    ]


def _growth(data: RolloutDataModule) -> str:
    if data.groups is not None:
        return "; more if episodes have several turns"
    return ", fewer turns as prompts grow" if data.memory.grows else ""


def step_turns(data: RolloutDataModule, world: int) -> int:
    """Return the number of turns of an optimizer step on each process; with groups, at least one turn per episode."""
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
        rows.append(("critic warm-up", f"{warmup} epochs, in which only the critic is trained"))
    if epochs is not None:
        left = max(epochs - warmup, 0)
        note = "" if left else "; the actor is never trained, raise trainer.max_epochs"
        groups = data.groups
        size = f"{left * (data.sizes.turns_per_rollout if groups is None else groups.episodes):,}"
        rows.append(("iterations of training", f"{left}, {size} {data.sizes.unit}{note}"))
    if data.validation.episodes:
        rows.append(("held-out episodes", held_out_plays(trainer, data.validation, epochs)))
    return rows


def _rates(trainer: L.Trainer, agent: Agent) -> Rows:
    full, name = agent.optim.rates, "learning rate of the"
    if not agent.steps.follows_schedule:
        return [("learning rates", "set by configure_optimizers")]
    trained = agent.critic is not None and not agent.critic.fitted
    groups = [group for group in full if group == "actor" or trained]
    steps, schedules = planned_steps(trainer), agent.optim.schedule.of
    return [(f"{name} {group}", rate_text(schedules[group], full[group], steps[group])) for group in groups]


def rate_text(schedule: Schedule, full: float, run: int | None) -> str:
    """Describe how a learning rate changes over the optimizer steps of its group.

    Args:
        schedule: schedule of the parameter group.
        full: configured learning rate.
        run: number of steps of the group in the run; None: unknown.
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
    """Describe when held-out episodes are played: at validations, and before and after the run for its summary.

    If a run continues a checkpoint, only the remaining iterations count.
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


def example_rows(prompts: Sequence[ModelInput], turns: int, data: RolloutDataModule) -> list[Row]:
    """Return ``turns`` different rows with the given prompts and replies of full length.

    If there are more rows than prompts, text prompts are repeated with other tokens after the prefix that each prompt
    shares with the most similar prompt; later turns share prefixes of about that length.

    Args:
        prompts: prompts to use.
        turns: number of rows.
        data: data module, for the length of replies.
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
    """Return for each row the length of the prefix that it shares with the most similar different row.

    If all rows are equal, return the length of the row.
    """
    different = sorted(set(rows))  # in sorted order, the most similar row is adjacent
    shared = [shared_length(*pair) for pair in pairwise(different)]
    longest = [max(sides) for sides in zip([0, *shared], [*shared, 0], strict=True)]
    partings = dict(zip(different, longest, strict=True)) if shared else {}
    return [partings.get(row, len(row)) for row in rows]
