"""What a checkpoint says about its agent, and what it leaves out: the frozen base that comes with the model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_agentrl.errors import CheckpointError
from lightning_agentrl.models.lora import durable_name, frozen_weights

if TYPE_CHECKING:
    from lightning_agentrl.agents.actor_critic import ActorCritic

KEY = "agent"


def prepare_checkpoint(agent: ActorCritic, checkpoint: dict[str, Any]) -> None:
    """Add what an export has to know, as plain types; masters of weights in their place; no frozen weights of LoRA."""
    checkpoint["state_dict"] = agent.masters.in_place_of(checkpoint["state_dict"])
    checkpoint[KEY] = {"model": durable_name(agent.model), "lora": agent.lora.settings if agent.lora else None}
    if agent.lora is not None:
        frozen = frozen_weights(agent)
        checkpoint["state_dict"] = {k: weight for k, weight in checkpoint["state_dict"].items() if k not in frozen}


def accept_checkpoint(agent: ActorCritic, checkpoint: dict[str, Any]) -> None:
    """Refuse adapters of another kind; put the frozen weights of this agent in, so that loading stays strict.

    Raises:
        ValueError: the checkpoint and this run do not both have the same LoRA, or both none.
    """
    saved = checkpoint.get(KEY, {})
    settings = agent.lora.settings if agent.lora else None
    if saved.get("lora") != settings:
        raise ValueError(
            f"the checkpoint has {_told(saved.get('lora'))}, this run has {_told(settings)}; "
            "give the same model.init_args.lora, or start without --ckpt_path"
        )
    if agent.lora is None:
        return
    if saved["model"] != durable_name(agent.model):
        rank_zero_warn(
            f"the adapters of the checkpoint belong to '{saved['model']}', this run puts them on '{agent.model}', "
            "which is right only if both are the same weights"
        )
    checkpoint["state_dict"] |= frozen_weights(agent)


def check_weights(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse the weights of other models.

    Raises:
        CheckpointError: how many weights differ, and one of each kind.
    """
    lacking = [name for name in own if name not in saved]
    further = [name for name in saved if name not in own]
    other = [name for name in own if name in saved and own[name].shape != saved[name].shape]
    found = []
    if lacking:
        found.append(f"it lacks {len(lacking)} weights such as {lacking[0]}")
    if further:
        found.append(f"it has besides {len(further)} weights such as {further[0]}")
    if other:
        there, here = list(saved[other[0]].shape), list(own[other[0]].shape)
        found.append(f"{len(other)} weights have another shape, such as {other[0]} {there} instead of {here}")
    if found:
        raise CheckpointError(
            f"is of another model: {', '.join(found)}",
            "give model.init_args.model and model.init_args.critic as they were, or leave ckpt_path out",
        )


def _told(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "no adapters"
    targets = settings["targets"]
    return (
        f"adapters of rank {settings['rank']} and alpha {settings['alpha']:g} on "
        f"{targets if isinstance(targets, str) else ', '.join(targets)}"
    )
