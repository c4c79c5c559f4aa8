"""Loading of saved policies: a checkpoint of a run, an exported folder, or a model of the hub."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lightning_agentrl.agents.checkpoint import METADATA, OF_ZERO, damage
from lightning_agentrl.agents.checkpoint_code import check_folder, read_metadata
from lightning_agentrl.agents.resume import KEY
from lightning_agentrl.errors.foreign_messages import not_plain
from lightning_agentrl.models.export import load_policy, take_weights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_tokenizer, read_context_length, read_images, resolve_model
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.rollout.policy_settings import SETTINGS_FILE, PolicySettings
from lightning_agentrl.types.model_input import ImageReader

PREFIX = "actor."  # prefix of the policy's weights in a checkpoint


@dataclass(frozen=True)
class SavedPolicy:
    """A saved policy whose weights are not loaded yet.

    Args:
        source: checkpoint, folder or hub id.
        model: hub id or folder of the policy's model; for a checkpoint, of the model that the run started from.
        tokenizer: tokenizer of the model.
        context_length: context length of the model in tokens.
        image_reader: converter of images to model inputs; None: the model reads text only.
        settings: prompt settings of the policy's training; None if they were not saved.
        lora: adapters of the policy; None: no adapters.
        weights: weights of a checkpoint by name; None: use the weights of the model.
    """

    source: str
    model: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    image_reader: ImageReader | None
    settings: PolicySettings | None
    lora: LoRA | None = None
    weights: Mapping[str, Tensor] | None = None

    def load(self) -> LanguageModel:
        """Load the weights.

        Raises:
            ValueError: the weights of the checkpoint do not fit the model.
        """
        policy = load_policy(self.model, self.lora)
        if self.weights is not None:
            try:
                take_weights(policy, self.weights)
            except RuntimeError as error:
                raise ValueError(f"the weights in '{self.source}' do not fit the model '{self.model}'") from error
        return policy


def find_policy(source: str | Path, model: str | None = None) -> SavedPolicy:
    """Find a saved policy without loading the weights of its model.

    Args:
        source: checkpoint of ``agentrl fit``, model folder (such as ``agentrl export`` writes), hub id, or ``demo``.
        model: hub id or folder of a checkpoint's base model, if it was moved after the run.

    Raises:
        ValueError: the checkpoint, folder or model does not exist or cannot be read.
    """
    path = Path(source).expanduser()
    is_checkpoint = path.suffix == ".ckpt" or (path.exists() and not (path / "config.json").is_file())
    if not is_checkpoint:
        name = str(path) if path.exists() else str(source)
        tokenizer = load_tokenizer(name)
        absent: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        file = cached_file(resolve_model(name), SETTINGS_FILE, **absent)
        return _saved(str(source), name, tokenizer, None if file is None else PolicySettings.in_file(Path(file)))
    saved = _read(path)
    about, weights = saved[KEY], saved["state_dict"]
    name = model or about["model"]
    tokenizer = load_tokenizer(name)
    lora = None if about["lora"] is None else LoRA(**about["lora"])
    if lora is not None:
        lora.check(name)
    plain = about.get("policy")  # checkpoints of earlier formats have no such entry
    settings = None if plain is None else PolicySettings.from_plain(plain, f"the checkpoint '{source}'")
    own = {key.removeprefix(PREFIX): weights[key] for key in weights if key.startswith(PREFIX)}
    return _saved(str(source), name, tokenizer, settings, lora, own)


def _saved(source: str, model: str, tokenizer: PreTrainedTokenizerBase, *rest: Any) -> SavedPolicy:
    return SavedPolicy(source, model, tokenizer, read_context_length(model), read_images(model), *rest)


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        if checkpoint.exists() and (reason := damage(checkpoint)).startswith("is damaged"):
            raise ValueError(f"the checkpoint '{checkpoint}' {reason}; choose another one beside it")
        check_folder(checkpoint)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = f"it holds an object of {kind}" if (kind := not_plain(error)) else "it is damaged"
        raise ValueError(f"the checkpoint '{checkpoint}' cannot be read: {why}; choose another one") from error
    if (checkpoint / METADATA).is_file():
        return _read_folder(checkpoint)
    if (checkpoint / OF_ZERO).is_file():
        return _read_file(checkpoint / OF_ZERO, weights="module")
    if checkpoint.is_dir():
        raise ValueError(
            f"the folder '{checkpoint}' is not a checkpoint that can be read; choose a file, or a folder of "
            "ModelParallelStrategy or DeepSpeedStrategy"
        )
    if not checkpoint.is_file():
        raise ValueError(f"there is no checkpoint file '{checkpoint}'")
    return _read_file(checkpoint)


def _read_file(file: Path, weights: str = "state_dict") -> dict[str, Any]:
    """Read the description and weights of a checkpoint file; ``weights`` is the key of the weights in it."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"the file '{file}' is not a checkpoint of agentrl: torch cannot read it") from error
    if not isinstance(saved, dict) or KEY not in saved or weights not in saved:
        raise ValueError(f"the file '{file}' is not a checkpoint of agentrl: it does not name its model")
    return {KEY: saved[KEY], "state_dict": saved[weights]}


def _read_folder(checkpoint: Path) -> dict[str, Any]:
    """Assemble the actor's weights from the shards that the processes wrote, without reading anything else."""
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
