"""Estimate of the memory that a run needs on each device, from the shapes of its models, without loading weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_agentrl.agents.models import Compute, Models
from lightning_agentrl.engines import EngineMemory
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK
from lightning_agentrl.models.loading import decoder_layers
from lightning_agentrl.models.lora import has_adapters

GPUS = (24, 40, 48, 80, 141)  # memory of common GPUs, in GB of 10^9 bytes
ROOM = 1.05  # factor on the estimate, for the allocator and libraries
HOLES = 0.5  # fragmentation as a share of the activations; 0.25 to 0.75 were measured (docs/results/speed.md)

Rows = list[tuple[str, str]]
Sharing = Literal["", "ddp", "fsdp2", "zero1", "zero2"]


@dataclass(frozen=True)
class Place:
    """The devices of a run, and how they shard weights, gradients and optimizer state.

    Args:
        on_gpu: whether the run uses GPUs rather than CPUs.
        processes: number of processes, one per device.
        nodes: number of nodes.
        sharing: kind of sharding or data parallelism; empty means neither sharding nor data parallelism.
        precision: precision of the trainer.
    """

    on_gpu: bool = False
    processes: int = 1
    nodes: int = 1
    sharing: Sharing = ""
    precision: str = "32-true"

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of matrix multiplications."""
        return {"bf16": torch.bfloat16, "64": torch.float64}.get(self.precision.split("-")[0], torch.float32)

    @property
    def mixed(self) -> bool:
        """Whether weights are float32 and matrix multiplications bfloat16."""
        return self.precision == "bf16-mixed"

    @property
    def shards(self) -> int:
        """Number of processes over which each weight is sharded."""
        return self.processes if self.sharing == "fsdp2" else 1


@dataclass(frozen=True)
class Step:
    """Size of an optimizer step on one process.

    Args:
        micro_batches: number of micro-batches.
        tokens: number of tokens of the largest micro-batch.
        reads: largest number of reply tokens in a micro-batch.
        total: number of tokens of all micro-batches.
    """

    micro_batches: int
    tokens: int
    reads: int
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process at its peak, in bytes."""

    program: int  # interpreter and libraries, on a CPU only
    weights: int  # actor, critic and reference
    gradients: int
    optimizer: int  # two moments of every trained parameter; with ZeRO and bf16-true also a copy of the weights
    gathered: int  # with FSDP2: the units that are gathered at the same time, and their gradients
    activations: int  # largest micro-batch, including weights that autocast has cast
    fragmentation: int  # on a CPU: freed memory that is too small for the activations of the next micro-batch
    engine: int  # memory that the engine never releases
    sampling: int  # memory of the engine and of gathered weights during sampling; released before an update
    share: float = 0.0  # fraction of a GPU's memory that the engine reserves in addition
    released: bool = False  # whether the engine releases `share` before an update
    copied: int = 0  # bytes of the policy's weights that must fit into `share`, besides keys and values

    def peaks(self, gpu: int = 0) -> tuple[int, int]:
        """Return the bytes needed by an update and by a collection; ``gpu`` is the size of the GPU in bytes."""
        always = self.program + self.weights + self.optimizer + self.engine
        share = int(self.share * gpu)
        update = self.gradients + self.gathered + self.activations + self.fragmentation + share * (not self.released)
        return always + update, always + self.sampling + share

    @property
    def peak(self) -> int:
        """Peak memory in bytes, without the engine's fraction of a GPU."""
        return max(self.peaks())

    def fits(self, gpu: int) -> bool:
        """Return whether a GPU with ``gpu`` bytes is large enough."""
        return ROOM * max(self.peaks(gpu)) <= gpu and ROOM * self.copied <= self.share * gpu

    @property
    def smallest_gpu(self) -> int | None:
        """The size in GB of the smallest common GPU that is large enough, or None."""
        return next((size for size in GPUS if self.fits(size * 10**9)), None)

    def lines(self) -> Rows:
        """Return rows (name, size) of the nonzero parts and the peak, as text."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("share", "released", "copied")}
        rows = [(name, size_text(size)) for name, size in sizes.items() if size]
        if self.share:
            when = "while it samples" if self.released else "all the time"
            rows.append(("engine", f"{self.share:g} of the GPU, {when}"))
        beside = " besides the engine" if self.share and not self.released else ""
        return [*rows, ("expected peak", f"{size_text(self.peak)}{beside}")]


def memory_plan(
    models: Models,
    compute: Compute,
    place: Place,
    step: Step,
    engine: EngineMemory,
    sends_layers: bool = False,
    program: int = 0,
) -> MemoryPlan:
    """Estimate the memory of one process.

    Args:
        models: models on the meta device, not sharded.
        compute: compute settings of the agent.
        place: devices of the run.
        step: size of an optimizer step.
        engine: memory of the engine.
        sends_layers: whether the engine gathers a sharded policy layer by layer instead of all at once.
        program: bytes of the interpreter and libraries.
    """
    parts = [model for model in (models.actor, models.critic, models.reference) if model is not None]
    weights = unique(p for part in parts for p in part.parameters())
    held = count(weights)
    if place.shards > 1 and models.critic is not None:  # with LoRA and FSDP2, actor and critic share no frozen weights
        actors = {id(p) for p in models.actor.parameters()}
        held += count(p for p in unique(models.critic.parameters()) if id(p) in actors)
    gradients, optimizer = trained_state([p for p in weights if p.requires_grad], place)
    activations = activation_bytes(models, compute, place, step.tokens, step.reads)
    gathered = 0
    whole = place.computes_in.itemsize * sum(p.numel() for p in unique(models.actor.parameters()))
    if place.shards > 1:
        # With adapters, only the adapters are sent to the engine.
        by_layer = 0 if has_adapters(models.actor.lm) else unit_bytes(models.actor, place)
        gathered = by_layer if sends_layers else whole
    return MemoryPlan(
        program=program,
        weights=held // place.shards,
        gradients=gradients,
        optimizer=optimizer,
        gathered=unit_bytes(models.actor, place, trained=True) if place.shards > 1 else 0,
        activations=activations,
        fragmentation=0 if place.on_gpu or step.micro_batches == 1 else int(HOLES * activations),
        engine=engine.resident,
        sampling=engine.sampling + gathered,
        share=engine.share,
        released=engine.released,
        copied=whole if engine.share else 0,
    )


def trained_state(trained: Iterable[nn.Parameter], place: Place) -> tuple[int, int]:
    """Return the bytes of gradients and of the optimizer state on one process.

    ZeRO shards the optimizer state, which includes a copy of the weights, and from stage 2 on the gradients. DDP has a
    second copy of the gradients in its buckets. With bf16-true, gradients are accumulated and weights updated in
    float32.
    """
    trained = list(trained)
    own = count(trained) // place.shards
    share = -(-own // place.processes)
    exact = 4 * sum(p.numel() for p in trained) if place.precision == "bf16-true" else 0
    gradients = share if place.sharing == "zero2" else own * (2 if place.sharing == "ddp" else 1) + exact
    return gradients, 3 * share if place.sharing.startswith("zero") else (3 * exact if exact else 2 * own)


def unit_bytes(model: nn.Module, place: Place, trained: bool = False) -> int:
    """Return the bytes that FSDP2 gathers at the same time: the weights outside layers, and two layers.

    Args:
        model: policy on the meta device.
        place: devices of the run.
        trained: whether to add the gradients of the weights outside layers, and their float32 sums.
    """
    layers = decoder_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    root = [p for p in unique(model.parameters()) if id(p) not in inside]
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    width = place.computes_in.itemsize
    gradients = (width + 4) * sum(p.numel() for p in root if p.requires_grad) if trained else 0
    return width * (sum(p.numel() for p in root) + 2 * largest) + gradients


def activation_bytes(models: Models, compute: Compute, place: Place, tokens: int, reads: int) -> int:
    """Estimate the peak bytes of a micro-batch's forward and backward pass, without the accumulated gradients.

    A layer stores inputs of its norms, attention and feed-forward network in the dtype of matrix multiplications, and
    the residual stream in the dtype of the weights. With gradient checkpointing, one layer stores all of these tensors,
    and all layers store their inputs. Log-probs and entropy store five arrays of logits, for one chunk of reply tokens
    if logits are recomputed. After the activations are freed, up to three copies of an embedding's gradient exist,
    since the gradient of a tied head is added.

    Args:
        models: models on the meta device.
        compute: compute settings of the agent.
        place: devices of the run.
        tokens: number of tokens of the micro-batch.
        reads: number of reply tokens in the micro-batch.
    """
    lm = models.actor.lm
    embedding, head = cast(nn.Embedding, lm.get_input_embeddings()), cast(nn.Linear, lm.get_output_embeddings())
    hidden, layers, wide, queries, keys = layer_sizes(lm.config.get_text_config())
    width = place.computes_in.itemsize
    residual = 4 if place.mixed and place.shards == 1 else width
    # Under autocast, rotary embeddings return float32, and the CPU's attention kernel stores float32 queries and keys.
    attention = 2 * (residual if not place.on_gpu else width) * (queries + keys)
    layer = 2 * (2 * residual + width) * hidden + attention + width * (4 * wide + (queries if place.mixed else 0))
    backward = width * (queries + keys + 2 * wide) + 2 * residual * hidden
    kept = residual * hidden * layers + layer if compute.gradient_checkpointing else layers * layer
    rows = min(reads, LOGITS_PER_CHUNK) if compute.recompute_logits else reads
    logits = rows * embedding.num_embeddings * ((width if width < 4 else 0) + 5 * max(width, 4))
    dense = count([embedding.weight]) // place.shards if embedding.weight.requires_grad else 0
    tied = head.weight is embedding.weight
    casts, own = cast_bytes(models, place)
    return casts + max(tokens * (kept + backward) + logits + dense * tied, own + dense * (3 if tied else 1))


def layer_sizes(config: PreTrainedConfig) -> tuple[int, int, int, int, int]:
    """Return hidden size, number of layers, and the sizes per token of feed-forward network, queries and keys."""
    sizes: Any = config
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    head = getattr(sizes, "head_dim", None) or hidden // heads
    dense = getattr(sizes, "intermediate_size", None) or 4 * hidden
    wide = getattr(sizes, "moe_intermediate_size", None) or dense
    experts = getattr(sizes, "num_experts_per_tok", None) or 1
    keys = getattr(sizes, "num_key_value_heads", None) or heads
    return hidden, sizes.num_hidden_layers, wide * experts, head * heads, head * keys


def cast_bytes(models: Models, place: Place) -> tuple[int, int]:
    """Return the bytes of autocast's cached casts of trained weights, and of the gradients of the policy's casts.

    From the second micro-batch on, these gradients exist until the end of the backward pass. With FSDP2 both sizes are
    0, since FSDP2 gathers weights in bfloat16.
    """
    if not place.mixed or place.shards > 1:
        return 0, 0
    sizes = []
    for part in (models.actor, models.critic):
        modules = [] if part is None else part.modules()
        unread = part.backbone.get_output_embeddings() if isinstance(part, SeparateCritic) else None
        read = unique(cast(nn.Parameter, m.weight) for m in modules if isinstance(m, nn.Linear) and m is not unread)
        sizes.append(2 * sum(p.numel() for p in read if p.requires_grad))
    return sum(sizes), sizes[0]


def turn_bytes(prompt: int, reply: int) -> int:
    """Return the bytes of main memory of a turn of a rollout: ids as Python integers, log-probs, text and a tensor row.

    Args:
        prompt: number of tokens of the prompt.
        reply: number of tokens of the longest reply.
    """
    return 36 * (prompt + reply) + 32 * reply + 48 * reply  # measured for Crafter: docs/many_devices.md


def budget_text(peak: Callable[[int], int], budget: int, tokens: int, gpu: int) -> str:
    """Describe the largest useful token budget of a micro-batch that fits a GPU.

    Args:
        peak: function that returns the peak bytes for a budget.
        budget: configured budget, in tokens.
        tokens: number of tokens of an optimizer step; a larger budget has no effect.
        gpu: memory of the GPU, in bytes.
    """
    sizes = [budget * factor // 4 or 1 for factor in (1, 2, 4, 8, 16, 32)]
    fitting = [size for size in sizes if ROOM * peak(size) <= gpu]
    useful = [size for size in fitting if size < 2 * tokens or size <= budget]
    if not useful:
        return f"none fits into {size_text(gpu)}; set compute.gradient_checkpointing to true, or use more GPUs"
    best = useful[-1]
    what = f"{best} tokens need {size_text(peak(best))} of {size_text(gpu)}"
    return f"{what}; keep it" if best == budget else f"{what}; set compute.max_tokens_per_micro_batch to it"


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return each parameter once."""
    return list({id(p): p for p in parameters}.values())


def count(parameters: Iterable[Tensor]) -> int:
    """Return the total size of parameters in bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


def size_text(size: int) -> str:
    """Return a number of bytes as text in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"
