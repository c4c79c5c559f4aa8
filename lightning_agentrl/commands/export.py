"""From a checkpoint of a run to a folder that transformers or peft load."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.checkpoint import METADATA, OF_ZERO, damage
from lightning_agentrl.agents.checkpoint_code import check_folder, read_metadata
from lightning_agentrl.agents.resume import KEY
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.errors.foreign_messages import not_plain
from lightning_agentrl.models.export import DRAFT, export_policy, load_policy, take_weights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.models.lora import LoRA

PREFIX = "actor."  # of the policy's weights in a checkpoint


def export_checkpoint(checkpoint: Path, folder: Path, merge: bool | None = None, model: str | None = None) -> str:
    """Write the policy of a checkpoint as a transformers folder.

    It has the tokenizer, and the dtype that the policy was trained in.

    Args:
        checkpoint: a checkpoint of `agentrl fit`.
        folder: output folder; it must be empty or not exist.
        merge: merge adapters into the model (default), or write the adapters alone.
        model: hub id or folder of the base model, if it moved after the run.

    Returns:
        What was done, for a terminal.

    Raises:
        ValueError: one sentence; the file is missing or not such a checkpoint, the folder is not empty, or ``merge`` is
            given without adapters.
        ImportError: the checkpoint has adapters, and peft is not installed.
    """
    if folder.exists() and (not folder.is_dir() or any(path.name != DRAFT for path in folder.iterdir())):
        raise ValueError(f"the folder '{folder}' exists and is not empty; give another one")
    policy, tokenizer, _ = policy_of(checkpoint, model, merge)
    export_policy(policy, tokenizer, folder, merge=merge is not False)
    return f"written to {folder}"


def policy_of(
    checkpoint: Path, model: str | None = None, merge: bool | None = None
) -> tuple[LanguageModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Return the policy of a checkpoint, its tokenizer, and by key of the config the settings of the run.

    The arguments and errors are those of :func:`export_checkpoint`.
    """
    saved = _read(checkpoint)
    settings = saved[KEY]["lora"]
    if settings is None and merge is not None:
        raise ValueError(f"the checkpoint '{checkpoint}' has no adapters; leave out --merge")
    name = model or saved[KEY]["model"]
    with naming_argument():
        tokenizer = load_tokenizer(name)
        lora = None if settings is None else LoRA(**settings)
        if lora is not None:
            lora.check(name)
        policy = load_policy(name, lora)
    weights = saved["state_dict"]
    try:
        take_weights(policy, {key.removeprefix(PREFIX): weights[key] for key in weights if key.startswith(PREFIX)})
    except RuntimeError as error:
        raise ValueError(f"the weights in '{checkpoint}' do not fit the model '{name}'") from error
    return policy, tokenizer, saved[KEY]["settings"]


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        if checkpoint.exists() and (reason := damage(checkpoint)).startswith("is damaged"):
            raise ValueError(f"the checkpoint '{checkpoint}' {reason}; give another one beside it")
        check_folder(checkpoint)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = f"it holds an object of {kind}" if (kind := not_plain(error)) else "it is damaged"
        raise ValueError(f"the checkpoint '{checkpoint}' cannot be read: {why}; give another one") from error
    if (checkpoint / METADATA).is_file():
        return _read_folder(checkpoint)
    if (checkpoint / OF_ZERO).is_file():
        return _read_file(checkpoint / OF_ZERO, weights="module")
    if checkpoint.is_dir():
        raise ValueError(
            f"the folder '{checkpoint}' cannot be exported; a file, or a folder of ModelParallelStrategy or of "
            "DeepSpeedStrategy, can"
        )
    if not checkpoint.is_file():
        raise ValueError(f"there is no checkpoint file '{checkpoint}'")
    return _read_file(checkpoint)


def _read_file(file: Path, weights: str = "state_dict") -> dict[str, Any]:
    """Read a file with the weights of all models under the key ``weights``; optimizer states stay unread."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"the file '{file}' is not a checkpoint of agentrl: torch cannot read it") from error
    if not isinstance(saved, dict) or KEY not in saved or weights not in saved:
        raise ValueError(f"the file '{file}' is not a checkpoint of agentrl: it does not name its model")
    return {KEY: saved[KEY], "state_dict": saved[weights]}


def _read_folder(checkpoint: Path) -> dict[str, Any]:
    """Assemble the actor's weights from the shares that each process wrote; nothing else is read."""
    saved = torch.load(checkpoint / METADATA, map_location="cpu", weights_only=True)
    weights = {
        name.removeprefix("state_dict."): torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in read_metadata(checkpoint / ".metadata").state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and name.startswith(f"state_dict.{PREFIX}")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")  # one process is enough
        load({"state_dict": weights}, checkpoint_id=checkpoint)
    return {KEY: saved[KEY], "state_dict": weights}
