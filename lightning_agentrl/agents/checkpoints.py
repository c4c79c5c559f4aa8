"""What a checkpoint says about its agent, and what it leaves out: the frozen base, which the model's name gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_agentrl.agents.checkpoint_files import NOT_OURS, OTHER_MODEL, last_good_checkpoint
from lightning_agentrl.agents.finite import SHOWN
from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.agents.resume import check_changes
from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.errors import CheckpointError, ConfigError, RunStoppedError
from lightning_agentrl.models.lora import LoRA, durable_name, frozen_weights

KEY = "agent"
FORMAT = 3  # raised with any change of what a checkpoint holds; tests/agents/test_checkpoint_format.py has its entries


def save_agent(agent: Any, checkpoint: dict[str, Any]) -> None:
    """Add an agent and the state of its run to a checkpoint.

    Args:
        agent: an ``Agent``.
        checkpoint: of Lightning; changed in place.

    Raises:
        RunStoppedError: weights or states of the optimizer are not finite.
    """
    made_of = agent.made_of | {"undescribed": agent.undescribed}
    prepare_checkpoint(checkpoint, agent, agent.masters, agent.model, agent.lora, made_of)
    refuse_not_finite(checkpoint, agent.trainer)
    checkpoint |= {
        "run_id": agent.run_id,
        "recent_episodes": agent.recent_episodes.state_dict(),
        **agent.steps.state_dict(),
        "date": agent.datamodule.date.now.isoformat(),
    }
    if agent.datamodule.preparing:
        rewind(checkpoint["loops"]["fit_loop"]["epoch_progress"])


def load_agent(agent: Any, checkpoint: dict[str, Any]) -> None:
    """Take over an agent and the state of its run from a checkpoint; every rank must call it.

    Args:
        agent: an ``Agent``.
        checkpoint: of Lightning; changed in place.

    Raises:
        CheckpointError: it does not fit, or training would go on with something else than was accepted.
    """
    accept_checkpoint(checkpoint, agent, agent.model, agent.lora)
    agent.saved_weights = checkpoint.get("state_dict", {})  # sharded strategies have read the weights already
    if agent._trainer is None:
        given = {name for name, value in agent.hparams.items() if value is not None}
        check_described(checkpoint[KEY], given | {*agent.undescribed})
        return
    trainer = agent.trainer
    if trainer.state.fn == TrainerFn.FITTING:
        with raise_once():
            if trainer.is_global_zero:
                check_changes(checkpoint[KEY], agent.made_of, agent.resume_with_changes)
    agent.run_id = checkpoint["run_id"]
    agent.recent_episodes.load_state_dict(checkpoint["recent_episodes"])
    agent.steps.load_state_dict(checkpoint)
    agent.datamodule.date.now = datetime.fromisoformat(checkpoint["date"])


def prepare_checkpoint(
    checkpoint: dict[str, Any],
    module: nn.Module,
    masters: MasterWeights,
    model: str,
    lora: LoRA | None,
    made_of: Mapping[str, Any],
) -> None:
    """Add what an export has to know, as plain types; put masters in place of weights; drop what LoRA freezes.

    Args:
        checkpoint: changed in place.
        module: whose state dict it holds.
        masters: of its weights of 16 bits.
        model: hub id or folder of the actor.
        lora: its adapters.
        made_of: what the run is made of.
    """
    checkpoint["state_dict"] = masters.in_place_of(checkpoint["state_dict"])
    checkpoint[KEY] = {
        "format": FORMAT,
        "model": durable_name(model),
        "lora": lora.settings if lora else None,
        **made_of,
    }
    if lora is not None:
        frozen = frozen_weights(module)
        checkpoint["state_dict"] = {k: weight for k, weight in checkpoint["state_dict"].items() if k not in frozen}


def accept_checkpoint(checkpoint: dict[str, Any], module: nn.Module, model: str, lora: LoRA | None) -> None:
    """Refuse adapters and weights of other models; add the frozen weights of this run, so that loading stays strict.

    Args:
        checkpoint: changed in place.
        module: the one that will load it.
        model: hub id or folder of the actor of this run.
        lora: adapters of this run.

    Raises:
        ValueError: the checkpoint and this run do not both have the same LoRA, or both none.
        CheckpointError: it is of another program, or of another version of this one, or its weights are of another
            model.
    """
    if KEY not in checkpoint:
        raise CheckpointError(NOT_OURS)
    saved = checkpoint[KEY]
    if (form := saved.get("format")) != FORMAT:
        raise CheckpointError(
            f"was written by another version of lightning_agentrl: its format is {form}, this version reads {FORMAT}",
            "go on with the version that wrote it, or begin anew from its weights (agentrl export)",
        )
    settings = lora.settings if lora else None
    if saved["lora"] != settings:
        raise ValueError(
            f"the checkpoint has {_described(saved['lora'])}, this run has {_described(settings)}; "
            "give the same model.init_args.lora, or start without --ckpt_path"
        )
    if lora is not None:
        if saved["model"] != durable_name(model):
            rank_zero_warn(
                f"the adapters of the checkpoint belong to '{saved['model']}', this run puts them on '{model}', "
                "which is right only if both are the same weights"
            )
        checkpoint["state_dict"] |= frozen_weights(module)
    if "state_dict" in checkpoint:  # sharded strategies have read the weights already
        check_weights(checkpoint["state_dict"], module.state_dict())


def rewind(progress: Mapping[str, dict[str, int]]) -> None:
    """Make Lightning's counts of epochs those from before an iteration whose update has not begun.

    Args:
        progress: of the fit loop, changed in place.
    """
    for counts in progress.values():
        counts["ready"] = counts["started"] = counts["completed"]


def check_described(saved: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse to make an agent from a checkpoint that does not say all it was made with.

    Args:
        saved: what the checkpoint says of its agent.
        given: names of the arguments that this agent was made with.

    Raises:
        ConfigError: with the first argument that is missing.
    """
    for name in saved["undescribed"]:
        if name not in given:
            raise ConfigError(
                f"the checkpoint does not say what the agent's argument {name} was, since not every argument of it is "
                f"kept as an attribute of the same name; give it: load_from_checkpoint(..., {name}=...)"
            )


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
        found.append(f"it has {len(further)} more weights such as {further[0]}")
    if other:
        there, here = list(saved[other[0]].shape), list(own[other[0]].shape)
        found.append(f"{len(other)} weights have another shape, such as {other[0]} {there} instead of {here}")
    if found:
        raise CheckpointError(f"is of another model: {', '.join(found)}", OTHER_MODEL)


def refuse_not_finite(checkpoint: Mapping[str, Any], trainer: L.Trainer) -> None:
    """Refuse to save weights, or states of the optimizer, that are not finite; every rank must call it.

    Raises:
        RunStoppedError: on all ranks, if any rank holds such a number.
    """
    held = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    names = sorted({name for part in all_gather(list(not_finite_in(held))) for name in part})
    if names:
        reason = f"{len(names)} tensors to be saved are not finite, such as {', '.join(names[:SHOWN])}"
        with raise_once():
            raise RunStoppedError(f"{reason}; this checkpoint was not written", last_good_checkpoint(trainer))


def not_finite_in(state: Any, path: str = "") -> Iterator[str]:
    """Yield the names of the tensors in nested mappings and sequences that are not finite in what this rank holds."""
    if isinstance(state, Tensor):
        local = state.to_local() if isinstance(state, DTensor) else state
        if local.is_floating_point() and not bool(local.isfinite().all()):
            yield path
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from not_finite_in(value, f"{path}.{key}".lstrip("."))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from not_finite_in(value, f"{path}.{number}".lstrip("."))


def _described(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "no adapters"
    targets = settings["targets"]
    return (
        f"adapters of rank {settings['rank']} and alpha {settings['alpha']:g} on "
        f"{targets if isinstance(targets, str) else ', '.join(targets)}"
    )
