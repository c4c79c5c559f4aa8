"""Construction of actor, critic and reference, and checks that they read the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_agentrl.agents.sharding import in_lockstep, trainer_of
from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.models.families import image_reader
from lightning_agentrl.models.kernels import (
    Kernels,
    automatic_kernels,
    checkpoint_activations,
    round_linear_layers,
    use_kernels,
)
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import (
    KEY,
    load_causal_lm,
    load_tokenizer,
    read_config,
    read_context_length,
    read_images,
)
from lightning_agentrl.models.lora import LoRA, Unadapted
from lightning_agentrl.models.sequence import SequenceGroup, sequence_group
from lightning_agentrl.models.sharding import release, shard
from lightning_agentrl.models.vision import FamilyReader, tower


@dataclass(frozen=True)
class Compute:
    """Settings that trade memory for time; none of them changes what is learned.

    Args:
        max_tokens_per_micro_batch: largest number of tokens in one forward and backward pass; affects memory and speed,
            not the gradient. Scoring uses four times as many tokens, since it keeps no activations.
        gradient_checkpointing: whether to recompute activations in the backward pass.
        recompute_logits: whether to recompute the logits of sampled tokens in the backward pass, 1024 tokens at a time.
            False keeps the logits of a micro-batch, which is faster but needs memory for tokens x vocabulary.
        kernels: ``torch``: no changes; ``compiled``: compile the decoder layers once per run; ``liger``: use Liger's
            kernels, on a GPU only; ``auto``: ``compiled`` on a GPU if vLLM samples and weights are not sharded, else
            ``torch``. Speedups were measured on one GPU (docs/results/gpu.md).
        sequence_parallel: number of neighboring processes that read their rows together, each a shard of the tokens,
            for rows that do not fit on one device. ``max_tokens_per_micro_batch`` then counts the tokens of a shard.
    """

    max_tokens_per_micro_batch: int = 16384
    gradient_checkpointing: bool = False
    recompute_logits: bool = True
    kernels: Kernels = "auto"
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_micro_batch", "sequence_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.init_args.compute.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Models:
    """The models of an agent."""

    actor: LanguageModel
    critic: Critic | None
    reference: LanguageModel | None  # frozen and not registered in the agent, so it is neither optimized nor saved
    rounded: bool = False  # whether frozen weights are stored rounded to bfloat16, for autocast

    @property
    def share_prefixes(self) -> bool:
        """Whether both actor and critic can read prefix trees."""
        return self.actor.shares_prefixes and (self.critic is None or self.critic.shares_prefixes)

    def release(self) -> None:
        """Free gathered weights of sharded models, so that parameters are this rank's shards again."""
        for model in (self.actor, self.critic, self.reference):
            if model is not None:
                release(model)


def readers_for(agent: Any) -> tuple[PreTrainedTokenizerBase, FamilyReader | None, int]:
    """Return an agent's tokenizer, its image reader or None, and the smallest context length of its models.

    Raises:
        ValueError: the critic or reference has a different tokenizer or too short a context; the message names the key.
    """
    tokenizer = load_tokenizer(agent.model)
    context_length = _shared_context_length(agent, tokenizer, read_context_length(agent.model))
    return tokenizer, read_images(agent.model), context_length


def _shared_context_length(agent: Any, tokenizer: PreTrainedTokenizerBase, own: int) -> int:
    """Check that the critic and reference use the policy's tokens; return the smallest context length of all models.

    Args:
        agent: an ``Agent``.
        tokenizer: tokenizer of the policy.
        own: context length of the policy in tokens.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    critic = agent.critic.model if isinstance(agent.critic, SeparateCritic) else None
    lengths = [own]
    for other, key in (
        (agent.reference, "model.init_args.kl.reference"),
        (critic, "model.init_args.critic.init_args.model"),
    ):
        if other is not None and other != agent.model:
            length = _check_reads_alike(tokenizer, other, key, agent.datamodule.longest_turn)
            lengths += [] if length is None else [length]
    return min(lengths)


def _check_reads_alike(tokenizer: PreTrainedTokenizerBase, other: str, key: str, longest: int) -> int | None:
    """Refuse a model that decodes the policy's token ids to different text, or whose context is too short.

    Args:
        tokenizer: tokenizer of the policy.
        other: hub id or folder of the model.
        key: config key that set the model, for the error message.
        longest: largest number of tokens in a prompt with its reply.

    Returns:
        Context length of the model in tokens; None: unlimited.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    own, others = tokenizer.get_vocab(), load_tokenizer(other, key).get_vocab()
    if own != others:
        differ = sum(others.get(text) != number for text, number in own.items())
        raise ValueError(
            f"the model '{other}' has another tokenizer than '{tokenizer.name_or_path}' ({differ} of {len(own)} tokens "
            f"differ), so it would read different text; choose a model with the same tokens (key {key})"
        )
    context = getattr(read_config(other, key).get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and longest > context:
        raise ValueError(
            f"the model '{other}' reads {context} tokens (key {key}), and a prompt and its reply may have {longest}; "
            "choose a model with a longer context, or lower data.init_args.prompt.max_prompt_tokens"
        )
    return context


def models_for(agent: Any) -> Models:
    """Build the models of an agent for the device, precision and strategy of its trainer, if it has one."""
    trainer, compute, mesh = trainer_of(agent), agent.compute, agent.device_mesh
    on_gpu = trainer is not None and isinstance(trainer.accelerator, CUDAAccelerator)
    if compute.kernels == "auto":
        sharded = trainer is not None and on_gpu and in_lockstep(trainer.strategy)
        samples = not on_gpu or not agent.datamodule.engine.holds_copy
        compute = replace(compute, kernels=automatic_kernels(on_gpu, sharded, samples))
    # Environments may seed torch, so seed the initialization of weights, such as adapters, explicitly.
    seeded: AbstractContextManager[None] = nullcontext()
    if trainer is not None:
        seeded = random_from(agent.datamodule.seed, trainer.strategy.root_device)
    with seeded:
        return build_models(
            agent.model,
            agent.critic,
            agent.reference if agent.needs.ref_logps else None,
            agent.lora,
            compute,
            None if trainer is None else trainer.precision,
            None if mesh is None else mesh["data_parallel"],
            agent.train_tower,
        )


def sequence_group_for(agent: Any) -> SequenceGroup | None:
    """Return this rank's group for sequence parallelism; None if it is off. All ranks must call this together."""
    trainer, size = trainer_of(agent), agent.compute.sequence_parallel
    trains = trainer is not None and trainer.state.fn == TrainerFn.FITTING
    return sequence_group(size) if trains and size > 1 else None


@contextmanager
def random_from(seed: int, device: torch.device) -> Iterator[None]:
    """Seed random operations on a device, such as dropout, and restore the random states afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would search for devices of all types
        for one in devices:
            torch.cuda.default_generators[one.index or 0].manual_seed(seed)
        yield


def build_models(
    model: str,
    critic: Critic | None,
    reference: str | None,
    lora: LoRA | None,
    compute: Compute,
    precision: str | None,
    mesh: DeviceMesh | None,
    train_tower: bool = False,
    load: Callable[..., PreTrainedModel] | None = None,
) -> Models:
    """Load or create all weights, one model after the other; each is sharded before the next is loaded.

    Args:
        model: hub id or folder of the actor's model.
        critic: critic whose weights are created here; None: no critic.
        reference: hub id or folder of the frozen reference model; under LoRA, if it equals ``model``, the frozen base
            is used. None means no reference.
        lora: adapters on one frozen base that all three models share, or with a mesh on separate bases of actor and
            critic; None: train all weights.
        compute: settings of activations and layers.
        precision: precision of the trainer; None without a trainer.
        mesh: ranks over which FSDP2 shards the weights; None: each rank has all weights.
        train_tower: whether to train the vision tower, too; must be False for text-only models.
        load: function that loads a model by name; ``load_causal_lm`` by default.
    """
    load = load or load_causal_lm
    base = None if lora is None or mesh is not None else load(model)  # FSDP2 shards weights of one model only
    rounds = precision == "bf16-mixed"

    def backbone(name: str, other: str | None = None) -> PreTrainedModel:
        if lora is None or other:
            key = "model.init_args.critic.init_args.model" if other else KEY
            lm = load(other or model, head=name != "critic", key=key)
        elif base is not None:
            lm = lora.adapt(base, name)
        else:
            lm = lora.adapt(load(model), name, share=False)
            if rounds:
                round_linear_layers(lm, torch.bfloat16, but=[p for p in lm.parameters() if p.requires_grad])
        for part in () if train_tower else tower(lm).values():
            part.requires_grad_(False)
        use_kernels(lm, compute.kernels)
        if compute.gradient_checkpointing:
            checkpoint_activations(lm)
        return lm.train()

    def share_out(module: nn.Module) -> None:
        if mesh is not None:
            shard(module, mesh, torch.bfloat16 if precision == "bf16-mixed" else None)

    actor = LanguageModel(backbone("actor"), compute.recompute_logits)
    share_out(actor)
    if critic is not None:
        critic.build(actor.hidden_size, lambda other: backbone("critic", other))
        _check_critic_images(actor, critic)
        share_out(critic)
    frozen: LanguageModel | None = None
    if reference == model and lora is not None and mesh is not None:
        frozen = Unadapted(actor)
    elif reference is not None:
        key = "model.init_args.kl.reference"
        lm = base if reference == model and base is not None else load(reference, key=key)
        frozen = LanguageModel(lm).requires_grad_(False).eval()
        if reference != model:
            _check_images(actor, frozen, reference)
        share_out(frozen)
    compared = frozen.lm if frozen is not None and mesh is None else None  # FSDP2 rounds weights as it gathers them
    to_round = [lm for lm in (base, compared) if lm is not None] if rounds else []
    for lm in to_round:
        round_linear_layers(lm, torch.bfloat16)
    models = Models(actor, critic, frozen, rounded=bool(to_round) or (rounds and lora is not None))
    if not models.share_prefixes and actor.shares_prefixes:
        rank_zero_warn(
            "the critic cannot read prefix trees, so the common prefixes of prompts are computed again for each turn, "
            "also by the actor"
        )
    return models


def _check_images(actor: LanguageModel, reference: LanguageModel, name: str) -> None:
    """Refuse a reference that does not process images in the same way as the actor.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    own, others = actor.image_reader, reference.image_reader
    if own is not None and (others is None or others.settings != own.settings):
        raise ValueError(
            f"the model '{name}' does not read images as the actor's does; choose one with the same patches and image "
            "processor (key model.init_args.kl.reference)"
        )


def _check_critic_images(actor: LanguageModel, critic: Critic) -> None:
    """Refuse a separate critic whose model does not process images in the same way as the actor.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    if not isinstance(critic, SeparateCritic) or critic.model is None or actor.image_reader is None:
        return
    own = image_reader(critic.backbone.config, critic.backbone.name_or_path)
    if own is None or own.settings != actor.image_reader.settings:
        raise ValueError(
            f"the critic's model '{critic.model}' does not read images as the actor's does; remove "
            "model.init_args.critic.init_args.model, or choose one with the same patches and image processor"
        )
