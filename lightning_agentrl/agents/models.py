"""Actor, critic and reference: how they are built, and which of them read rows as a prefix tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.kernels import Kernels, checkpoint_activations, round_linear_layers, use_kernels
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import KEY, load_causal_lm
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.sharding import release, shard
from lightning_agentrl.models.vision import image_reader, tower


@dataclass(frozen=True)
class Compute:
    """Settings that trade memory for time; none of them changes what is learned.

    Args:
        max_tokens_per_micro_batch: token budget of one forward and backward pass; affects memory and speed, not the
            gradient. Scoring takes four times as many, since it keeps no activations.
        gradient_checkpointing: recompute activations in the backward pass.
        recompute_logits: recompute the logits of the sampled tokens in the backward pass, 1024 tokens at a time; off:
            keep those of a micro-batch, which is faster and takes memory for tokens times vocabulary.
        kernels: ``compiled`` compiles the decoder layers, once per run; ``liger`` uses Liger's kernels, on a GPU;
            ``auto`` is ``compiled`` on a GPU if vLLM samples and weights are not sharded, else ``torch``. What they
            save was measured on one GPU (docs/results/gpu_runs.md).
    """

    max_tokens_per_micro_batch: int = 16384
    gradient_checkpointing: bool = False
    recompute_logits: bool = True
    kernels: Kernels = "auto"

    def __post_init__(self) -> None:
        if self.max_tokens_per_micro_batch < 1:
            raise ValueError(
                "model.init_args.compute.max_tokens_per_micro_batch must be at least 1, got "
                f"{self.max_tokens_per_micro_batch}"
            )


@dataclass(frozen=True)
class Models:
    """The models of an agent."""

    actor: LanguageModel
    critic: Critic | None
    reference: LanguageModel | None  # frozen; not registered in the agent, so neither optimised nor saved
    rounded: bool = False  # frozen weights are as autocast to bfloat16 rounds them

    @property
    def shared_critic(self) -> Critic | None:
        """The critic, where it reads the hidden states of the actor."""
        return self.critic if self.critic is not None and self.critic.shares_trunk else None

    @property
    def share_prefixes(self) -> bool:
        """Whether actor and critic read several rows as one prefix tree."""
        return self.actor.shares_prefixes and (self.critic is None or self.critic.shares_prefixes)

    def release(self) -> None:
        """Drop gathered weights of sharded models, so that parameters are this rank's shares again."""
        for model in (self.actor, self.critic, self.reference):
            if model is not None:
                release(model)


def build_models(
    model: str,
    critic: Critic | None,
    reference: str | None,
    lora: LoRA | None,
    compute: Compute,
    precision: str | None,
    mesh: DeviceMesh | None,
    train_tower: bool = False,
) -> Models:
    """Load or create all weights, one model after the other; each is sharded before the next is loaded.

    Args:
        model: hub id or folder.
        critic: gets its weights here; None: there is none.
        reference: hub id or folder of a frozen model to compare with; with LoRA, the base below the adapters if it is
            the same model. None: there is none.
        lora: adapters on one frozen base that all three share; None: all weights are trained.
        compute: how activations and layers are computed.
        precision: of the trainer; None outside of one.
        mesh: the ranks that share the weights (FSDP2); None: each rank has all of them.
        train_tower: whether what reads images is trained too; without images it must be False.
    """
    base = None if lora is None else load_causal_lm(model)

    def backbone(name: str, other: str | None = None) -> PreTrainedModel:
        if lora is None or base is None or other:
            key = "model.init_args.critic.init_args.model" if other else KEY
            lm = load_causal_lm(other or model, head=name != "critic", key=key)
        else:
            lm = lora.adapt(base, name)
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
    frozen = None
    if reference is not None:
        key = "model.init_args.kl.reference"
        lm = base if reference == model and base is not None else load_causal_lm(reference, key=key)
        frozen = LanguageModel(lm).requires_grad_(False).eval()
        _check_images(actor, frozen, reference)
        share_out(frozen)
    compared = frozen.lm if frozen is not None and mesh is None else None  # a sharded one is rounded as it is gathered
    to_round = [lm for lm in (base, compared) if lm is not None] if precision == "bf16-mixed" else []
    for lm in to_round:
        round_linear_layers(lm, torch.bfloat16)
    models = Models(actor, critic, frozen, rounded=bool(to_round))
    if not models.share_prefixes:
        why = why_unshared(actor.lm.config)
        who = f"'{model}' ({why})" if why else "the critic"
        rank_zero_warn(
            f"{who} cannot read several rows as one, so the beginnings that prompts share are computed again for "
            "each turn"
        )
    return models


def _check_images(actor: LanguageModel, reference: LanguageModel, name: str) -> None:
    """Refuse a reference that reads images otherwise than the actor does, or not at all.

    Raises:
        ValueError: one sentence with the key to change.
    """
    own, others = actor.image_reader, reference.image_reader
    if own is not None and (others is None or others.settings != own.settings):
        raise ValueError(
            f"the model '{name}' does not read images as the actor's does; give one with equal patches and an equal "
            "image processor (key model.init_args.kl.reference)"
        )


def _check_critic_images(actor: LanguageModel, critic: Critic) -> None:
    """Refuse a critic with a model that would read images otherwise than the actor does.

    Raises:
        ValueError: one sentence with the key to change.
    """
    if actor.image_reader is None or not isinstance(critic, SeparateCritic) or critic.model is None:
        return
    own = image_reader(critic.backbone.config, critic.backbone.name_or_path)
    if own is None or own.settings != actor.image_reader.settings:
        raise ValueError(
            f"the critic's model '{critic.model}' does not read images as the actor's does; leave out "
            "model.init_args.critic.init_args.model, or give one with equal patches and an equal image processor"
        )
