"""What memory a run will need: counted, and measured on short rows before it starts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.scoring import policy_handle
from lightning_agentrl.agents.sharding import zero_stage
from lightning_agentrl.models.allocator import resident_bytes, trim
from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK, LanguageModel
from lightning_agentrl.models.lora import has_adapters
from lightning_agentrl.models.sharding import gathered, local_bytes, units
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.types import ModelInput, Row

PROBE_TOKENS = 1024  # the longest micro-batch that is measured
HOLES = 0.5  # of the activations; 0.25 to 0.75 were measured (docs/results/memory.md)
ROOM = 0.9  # of a GPU's free memory that a plan may use; the allocator and libraries need some


Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process at the peak of an update, in bytes."""

    program: int  # interpreter and libraries, on a CPU only
    weights: int  # of actor, critic and reference
    gradients: int
    optimizer: int  # two moments of every trained parameter; under ZeRO a share of them and of a copy of the weights
    activations: int  # of one micro-batch at its token budget, with copies of weights that autocast makes
    holes: int  # on a CPU: freed memory between the gradients of earlier micro-batches, too small for the next one
    engine: int  # what it holds all the time
    sampling: int  # of the engine while it samples, with what is gathered of a sharded policy; not in the update

    @property
    def peak(self) -> int:
        always = self.program + self.weights + self.optimizer + self.engine
        return always + max(self.gradients + self.activations + self.holes, self.sampling)

    def lines(self) -> Rows:
        rows = [(f"{name}", _size(getattr(self, name))) for name in self.__dataclass_fields__ if getattr(self, name)]
        return [*rows, ("expected peak", _size(self.peak))]


def memory_plan(agent: Agent, data: RolloutDataModule, rows: Sequence[Row]) -> MemoryPlan:
    """Count weights, measure micro-batches on short rows, and extrapolate to the longest.

    Args:
        agent: whose models have been loaded.
        data: connected to it.
        rows: of an optimizer step on this process, as long as they can be expected.
    """
    every = _weights(agent)
    trained = _bytes(p for p in every if p.requires_grad)
    gradients, optimizer = trained_state(trained, zero_stage(agent.trainer.strategy), agent.trainer.world_size)
    plans = agent.reader.micro_batches(rows)
    longest = max(agent.reader.pack([rows[i] for i in index]).tokens for index in plans)
    if len(plans) > 1:  # other rows may fill the budget, which a single one of them may exceed
        longest = max(longest, agent.compute.max_tokens_per_micro_batch)
    reads = max(sum(len(rows[i].logit_positions) for i in index) for index in plans)
    engine = data.engine.memory(policy_handle(agent), data.sizes.at_a_time(agent.trainer.world_size))
    activations, on_cpu = activation_bytes(agent, longest, reads), agent.device.type == "cpu"
    return MemoryPlan(
        program=program_bytes(agent) if on_cpu else 0,  # with what libraries keep once models ran
        weights=_bytes(every),
        # DDP keeps a second copy in its buckets
        gradients=gradients * (2 if isinstance(agent.trainer.strategy, DDPStrategy) else 1),
        optimizer=optimizer,
        activations=activations,
        holes=int(HOLES * activations) if on_cpu and len(plans) > 1 else 0,
        engine=engine.resident,
        sampling=engine.sampling
        + gathered_bytes(agent.actor, data.engine.sends_layers and not has_adapters(agent.actor.lm)),
    )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process may use; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def suggested_budget(agent: Agent, plan: MemoryPlan, rows: Sequence[Row], free: int | None) -> Rows:
    """Return a line with the token budget of a micro-batch that fits into free memory; none if that is not known."""
    if free is None:
        return []
    budget = agent.compute.max_tokens_per_micro_batch
    packed = [agent.reader.pack([rows[i] for i in index]) for index in agent.reader.micro_batches(rows)]
    tokens, reads = sum(one.tokens for one in packed), sum(len(row.logit_positions) for row in rows)
    peaks = {}
    for size in (budget * factor // 4 or 1 for factor in (1, 2, 4, 8, 16, 32)):  # sharded models need all ranks
        activations = activation_bytes(agent, size, max(reads * size // tokens, 1))
        peaks[size] = replace(plan, activations=activations).peak
    return [("micro-batch budget", budget_text(peaks, budget, tokens, free))]


def budget_text(peaks: Mapping[int, int], budget: int, tokens: int, free: int) -> str:
    """Return which token budget fits.

    Args:
        peaks: bytes by budget, smallest first.
        budget: the configured one.
        tokens: of an optimizer step; a larger budget than that saves nothing more.
        free: bytes of the GPU that this process may use.
    """
    fitting = [size for size, peak in peaks.items() if peak <= ROOM * free]
    useful = [size for size in fitting if size < 2 * tokens or size <= budget]
    if not useful:
        return f"none fits into {_size(free)} of free memory; turn on gradient_checkpointing or use more GPUs"
    best = useful[-1]
    what = f"{best} tokens need {_size(peaks[best])} of {_size(free)} free memory"
    return f"{what}; keep it" if best == budget else f"{what}; set compute.max_tokens_per_micro_batch to it"


def trained_state(trained: int, stage: int, processes: int) -> tuple[int, int]:
    """Return the bytes of gradients and of the optimizer on a process, given those of its trained weights.

    Args:
        trained: of the weights that it has and trains; under FSDP2 those of its share.
        stage: of ZeRO, which shares out the optimizer, with a copy of the weights, and from 2 on the gradients; or 0.
        processes: of the run.
    """
    share = -(-trained // processes)
    return share if stage >= 2 else trained, 3 * share if stage else 2 * trained


def program_bytes(agent: Agent) -> int:
    """Return the main memory of the process without what it has loaded: interpreter, libraries, games.

    Weights are loaded, and the state of the optimizer where a run goes on from a checkpoint.
    """
    weights = _weights(agent)
    for weight in weights:  # some are mapped from files, and not there before they are read
        (weight.to_local() if isinstance(weight, DTensor) else weight).detach().sum()
    trim()
    states = tree_leaves([list(optimizer.state.values()) for optimizer in agent.trainer.optimizers])
    loaded = [*weights, *(state for state in states if isinstance(state, Tensor))]
    return max(resident_bytes() - _bytes(loaded), 0)


def _weights(agent: Agent) -> list[torch.nn.Parameter]:
    """Return each weight of actor, critic and reference once."""
    models = [model for model in (agent.actor, agent.critic, agent.models.reference) if model is not None]
    return list({id(p): p for model in models for p in model.parameters()}.values())


def activation_bytes(agent: Agent, tokens: int, reads: int) -> int:
    """Return the most bytes that the update needs for one micro-batch, gradients of weights not counted.

    A micro-batch of up to PROBE_TOKENS is measured. Beyond that, a parabola through three measurements has a constant
    (weights cast by autocast), a part that grows with the tokens, and one that grows with their square (attention,
    where it is dense). They have the same share of logit positions as the micro-batch, up to one chunk of them if
    logits are recomputed: a multiple of four in the longest, since far outside a row too many would count a thousand
    times.
    """
    kept = min(reads, LOGITS_PER_CHUNK) if agent.compute.recompute_logits else reads
    longest = max(min(PROBE_TOKENS, agent.actor.context_length, tokens), 3)
    lengths = [max(longest // 4, 1), longest // 2 + longest % 2, longest]
    most = 4 * math.ceil(longest * min(kept / tokens, 1.0) / 4)

    def measured() -> list[int]:
        return [micro_batch_bytes(agent, n, min(most // parts, n)) for n, parts in zip(lengths, (4, 2, 1), strict=True)]

    if agent.device.type == "cuda":
        measured()  # libraries take memory of their own at their first use
    return int(np.polynomial.Polynomial.fit(lengths, measured(), deg=2)(tokens))


def micro_batch_bytes(agent: Agent, tokens: int, reads: int) -> int:
    """Measure :func:`activation_bytes` on one row, as the update goes: the actor, then a critic of its own.

    Sharded models are only read, since what differentiates them needs all ranks.
    """
    packed = agent.reader.pack([Row(ModelInput.of_ids((0,) * (tokens + 1)), tuple(range(tokens - reads, tokens)))])
    critic, whole = agent.critic, not units(agent.actor)
    with gathered(agent.actor), gathered(critic or agent.actor):
        live = AllocatedBytes() if agent.device.type == "cuda" else LiveBytes([*agent.parameters(), *agent.buffers()])
        with agent.reader.precision(), live:
            for _ in range(2 if torch.is_autocast_enabled(agent.device.type) else 1):  # then with what that has cast
                hidden = agent.actor.hidden(packed)
                scores = agent.actor.token_scores(hidden, packed.targets, agent.temperature)
                outputs = [scores.logps, scores.entropy]
                if critic is not None and critic.shares_trunk:
                    outputs.append(critic(packed, hidden))
                del hidden, scores
                if whole:
                    _differentiate(outputs, agent.actor if critic is None else agent)
                outputs.clear()
                if critic is not None and not critic.shares_trunk:
                    outputs = [critic(packed, None)]
                    if whole:
                        _differentiate(outputs, critic)
    return live.peak


def _differentiate(outputs: list[Tensor], module: torch.nn.Module) -> None:
    """Run the backward pass, which frees the graph. Each gradient is dropped once it is made.

    Nothing is accumulated, so no hook of a strategy runs.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient)) for p in trained]
    sums = [output.float().sum() for output in outputs if output.requires_grad]
    torch.autograd.grad(sums, trained, allow_unused=True)
    for hook in hooks:
        hook.remove()


class AllocatedBytes:
    """As :class:`LiveBytes`, of a GPU, by its allocator: FlexAttention is not compiled under a dispatch mode.

    By what the allocator was asked for, since it gives up to a MiB more for each large tensor.
    """

    peak = 0

    def __enter__(self) -> AllocatedBytes:
        torch.cuda.reset_peak_memory_stats()
        self._before = _asked("current")
        return self

    def __exit__(self, *raised: object) -> None:
        self.peak = _asked("peak") - self._before


def _asked(when: Literal["current", "peak"]) -> int:
    kind = "requested" if torch.cuda.get_allocator_backend() == "native" else "allocated"  # which is all others tell
    return int(torch.cuda.memory_stats()[f"{kind}_bytes.all.{when}"])


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations inside have made and that are still there, and the most there were.

    Args:
        known: tensors that were there before.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}  # by the address of a storage
        self._watched: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)]
        for storage in storages:
            if (key := storage._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self._watched[key] = weakref.ref(storage, partial(self._end, key))
                self.now += self._sizes[key]
                self.peak = max(self.peak, self.now)
        return made

    def _end(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key)
        del self._watched[key]


def gathered_bytes(actor: LanguageModel, by_layer: bool) -> int:
    """Return the bytes of the weights that are gathered at once beside this rank's share; 0 if it is not sharded.

    Args:
        actor: the policy.
        by_layer: not all of it, but what is in no layer, a layer, and the copy of one that is sent.
    """
    if not units(actor):
        return 0
    with gathered(actor):
        whole = _bytes(actor.parameters())
        layers = [_bytes(cast(torch.nn.Module, layer).parameters()) for layer in units(actor)[1:]]
    return whole - sum(layers) + 2 * max(layers) if by_layer else whole


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(local_bytes, tensors))


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.0f} MiB"
