"""What a run would do: sizes, memory and one prompt, printed by `agentrl fit --dry-run` once everything is built."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.strategies import in_lockstep
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.callbacks.progress import total_epochs
from lightning_agentrl.callbacks.run_record import count_parameters
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.models.critic import Critic
from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK, LanguageModel
from lightning_agentrl.models.packing import Row
from lightning_agentrl.models.sharding import gathered, local_bytes, units
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.shown import shown
from lightning_agentrl.prompts.template import Message
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.types import ModelInput

PROBE_TOKENS = (64, 128, 256)  # lengths at which activations are measured


class PlanShown(Exception):
    """The end of a dry run, raised after the plan so that nothing is trained."""


class DryRun(L.Callback):
    """The plan of a run, printed in place of its start. Make it before models are loaded: it measures memory first."""

    def __init__(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.program_bytes = peak * (1 if sys.platform == "darwin" else 1024)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero or in_lockstep(trainer.strategy):  # sharded models are measured by all ranks
            text = plan_text(trainer, cast(Agent, pl_module), self.program_bytes)
            rank_zero_only(print)(text, flush=True)
        raise PlanShown


def plan_text(trainer: L.Trainer, agent: Agent, program_bytes: int) -> str:
    """Return the plan as readable text. ``program_bytes`` is the memory of the process without models."""
    data = agent.datamodule
    prompts = data.first_prompts()
    sections = {
        "models": _models(agent),
        "an iteration": _iteration(trainer, agent, data, prompts),
        "the run": _run(trainer, data),
        "memory of one process": memory_plan(agent, data, prompts, program_bytes).lines(),
    }
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines = []
    for title, rows in sections.items():
        lines += ["", f"{title}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
    with data.first_session() as session:
        parts = prompt_parts(session, data.renderer)
    counts = ", ".join(f"{name} {count}" for name, count in parts.items() if count)
    text = shown(agent.tokenizer, prompts[0])
    lines += ["", f"one prompt: {len(prompts[0])} tokens ({counts})", *(f"  | {line}" for line in text.splitlines())]
    return "\n".join(lines[1:])


Rows = list[tuple[str, str]]


def _models(agent: Agent) -> Rows:
    config = agent.actor.lm.config
    rows = [("actor", f"{agent.model}, {config.model_type}, {_trained(agent.actor)}")]
    if agent.critic is not None:
        kind = type(agent.critic).__name__.removeprefix("FSDP")  # sharding renames classes
        rows.append(("critic", f"{kind}, {_trained(agent.critic)}"))
    kept = "frozen copy of the initial policy" if agent.lora is None else "the frozen model below the adapters"
    rows.append(("reference", kept if agent.needs.ref_logps else "none"))
    return rows


def _trained(module: torch.nn.Module) -> str:
    every, trained = count_parameters(module), count_parameters(module, trained=True)
    return f"{every:,} parameters" + ("" if every == trained else f", {trained:,} of them trained")


def _iteration(trainer: L.Trainer, agent: Agent, data: RolloutDataModule, prompts: Sequence[ModelInput]) -> Rows:
    several = trainer.world_size > 1
    per_process = f", {data.at_a_time} environments on each of {trainer.world_size} processes" if several else ""
    turns = step_turns(data, trainer.world_size)
    micro_batches = agent.reader().micro_batches(example_rows(prompts, turns, data))
    return [
        *_sizes(data, per_process),
        (
            "micro-batches",
            f"about {len(micro_batches)} of {math.ceil(turns / len(micro_batches))} turns in each step, at most "
            f"{agent.compute.max_tokens_per_micro_batch} tokens" + _growth(data),
        ),
        ("prompts", f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens at the start of an episode"),
        ("replies", f"at most {data.interaction.max_reply_tokens} tokens"),
    ]


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
    warmup = sum(c.total_epochs for c in cast(Any, trainer).callbacks if isinstance(c, CriticWarmup))
    epochs = total_epochs(trainer)
    rows = [("epochs", "no limit" if epochs is None else str(epochs))]
    if warmup:
        rows.append(("critic warm-up", f"{warmup} epochs, in which only the critic learns"))
    if epochs is not None:
        left = max(epochs - warmup, 0)
        note = "" if left else "; the actor would never be trained, raise trainer.max_epochs"
        groups = data.groups
        size = f"{left * (data.sizes.turns_per_rollout if groups is None else groups.episodes):,}"
        rows.append(("iterations of training", f"{left}, {size} {data.sizes.unit}{note}"))
    if data.validation.episodes:
        often = trainer.check_val_every_n_epoch
        rows.append(("held-out episodes", f"{data.validation.episodes}, every {often} epochs"))
    return rows


def example_rows(prompts: Sequence[ModelInput], turns: int, data: RolloutDataModule) -> list[Row]:
    """Return ``turns`` different rows with the given prompts and replies of full length."""
    reply = data.interaction.max_reply_tokens
    rows = []
    for i in range(turns):
        prompt = prompts[i % len(prompts)]
        row = prompt + ModelInput.of_ids((i, *([0] * (reply - 1))))
        rows.append(Row(row, tuple(range(len(prompt) - 1, len(row) - 1))))
    return rows


# Memory


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process at the peak of an update, in bytes."""

    program: int  # interpreter and libraries, on a CPU only
    weights: int  # of actor, critic and reference
    gradients: int
    optimizer: int  # two moments of every trained parameter
    activations: int  # of one micro-batch at its token budget
    engine: int  # what it holds all the time
    sampling: int  # of the engine while it samples, with the gathered weights of a sharded policy; not in the update

    @property
    def peak(self) -> int:
        always = self.program + self.weights + self.optimizer + self.engine
        return always + max(self.gradients + self.activations, self.sampling)

    def lines(self) -> Rows:
        rows = [(f"{name}", _size(getattr(self, name))) for name in self.__dataclass_fields__ if getattr(self, name)]
        return [*rows, ("expected peak", _size(self.peak))]


def memory_plan(agent: Agent, data: RolloutDataModule, prompts: Sequence[ModelInput], program_bytes: int) -> MemoryPlan:
    """Count weights, measure activations on short rows, and extrapolate them to the longest micro-batch."""
    modules = [module for module in (agent.actor, agent.critic) if module is not None]
    frozen = [] if agent.models.reference is None else list(agent.models.reference.parameters())
    every = list({id(p): p for p in [*(p for m in modules for p in m.parameters()), *frozen]}.values())
    trained = [p for p in every if p.requires_grad]
    rows = example_rows(prompts, step_turns(data, agent.trainer.world_size), data)
    plans = agent.reader().micro_batches(rows)
    longest = max(agent.reader().pack([rows[i] for i in index]).tokens for index in plans)
    reads = max(sum(len(rows[i].logit_positions) for i in index) for index in plans)
    window = data.prompt.max_prompt_tokens + data.interaction.max_reply_tokens
    handle = replace(agent.policy_handle(()), max_model_len=window, trained_meanwhile=data.max_staleness > 0)
    engine = data.engine.memory(handle, data.at_a_time)
    return MemoryPlan(
        program=program_bytes if agent.device.type == "cpu" else 0,
        weights=_bytes(every),
        gradients=_bytes(trained) * (2 if _copies_gradients(agent.trainer) else 1),
        optimizer=2 * _bytes(trained),
        activations=activation_bytes(agent, longest, reads),
        engine=engine.resident,
        sampling=engine.sampling + _gathered_bytes(agent.actor),
    )


def _copies_gradients(trainer: L.Trainer) -> bool:
    """Return whether DDP keeps a second copy of all gradients in its buckets, as it does unless they are views."""
    strategy = trainer.strategy
    return isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("gradient_as_bucket_view")


def activation_bytes(agent: Agent, tokens: int, reads: int) -> int:
    """Return the bytes that one micro-batch keeps for its backward pass, the larger of actor and separate critic.

    A parabola through three measurements has a constant (weights cast by autocast), a part that grows with the tokens,
    and one that grows with their square (attention, where it is dense). Scores at the logit positions are counted
    apart, up to one chunk of them if logits are recomputed. Temporary tensors within one layer are left out.
    """
    critics = [agent.critic] if agent.critic is None or agent.critic.shares_trunk else [None, agent.critic]

    def at(length: int, reads: int = 1) -> int:
        return max(_saved_bytes(agent, critic, length, reads) for critic in critics)

    parabola = np.polynomial.Polynomial.fit(PROBE_TOKENS, [at(length) for length in PROBE_TOKENS], deg=2)
    shortest = PROBE_TOKENS[0]
    per_read = (at(shortest, shortest) - at(shortest)) / (shortest - 1)
    kept = min(reads, LOGITS_PER_CHUNK) if agent.compute.recompute_logits else reads
    return int(parabola(tokens) + per_read * (kept - 1))


def _saved_bytes(agent: Agent, critic: Critic | None, tokens: int, reads: int) -> int:
    """Return the bytes that one forward pass keeps for the backward pass, parameters not counted."""
    with gathered(agent.actor), gathered(agent.critic or agent.actor):
        return _saved_by_whole_models(agent, critic, tokens, reads)


def _saved_by_whole_models(agent: Agent, critic: Critic | None, tokens: int, reads: int) -> int:
    own = {p.untyped_storage().data_ptr() for p in agent.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    packed = agent.reader().pack([Row(ModelInput.of_ids((0,) * (tokens + 1)), tuple(range(tokens - reads, tokens)))])
    with agent.trainer.precision_plugin.forward_context(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        if critic is None or critic.shares_trunk:
            hidden = agent.actor.hidden(packed)
            scores = agent.actor.token_scores(hidden, packed.targets, agent.temperature)
            outputs: Iterable[Any] = (scores, critic(packed, hidden) if critic is not None else None)
        else:
            outputs = (critic(packed, None),)
    size = sum(kept.values())
    del outputs  # the graph had to live until here
    return size


def _gathered_bytes(actor: LanguageModel) -> int:
    """Return the bytes of the whole policy, which is gathered beside this rank's share; 0 if it is not sharded."""
    if not units(actor):
        return 0
    with gathered(actor):
        return _bytes(actor.parameters())


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(map(local_bytes, parameters))


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.0f} MiB"


def prompt_parts(session: Session, renderer: ChatRenderer) -> dict[str, int]:
    """Return the tokens of system text, worked examples, history, and the current message with all headers.

    They add up to the prompt. A part is what the prompt shrinks by without it, since a template may refuse a
    conversation that lacks more.
    """
    parts = renderer.messages(
        session.contract.system_prompt,
        session.contract.examples,
        session.memory.recall(session.past),
        session.observation,
        session.short_term,
        session.contract.actions,
        session.images,
        places=session.contract.places,
    )

    def tokens(system: list[Message], without: str = "") -> int:
        others = [m for name in ("examples", "history", "current") if name != without for m in parts[name]]
        return renderer.count_tokens(system + others, reply_follows=True, tools=session.contract.tool_schemas)

    whole = tokens(parts["system"])
    counts = {"system": whole - tokens([renderer.message("system", "")] if parts["system"] else [])}
    counts |= {name: whole - tokens(parts["system"], name) for name in ("examples", "history")}
    return {**counts, "current": whole - sum(counts.values())}
