"""Export of a policy as a standard transformers folder, or of its adapters as a PEFT folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.lora import LoRA, frozen_weights, has_adapters, merge_adapters

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WEIGHT_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
DRAFT = ".draft"  # temporary folder inside the target folder, until the export is complete
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def load_policy(model: str, lora: LoRA | None) -> LanguageModel:
    """Load the policy that a run starts from, with new adapters if the run uses LoRA."""
    base = load_causal_lm(model)
    return LanguageModel(base if lora is None else lora.adapt(base, "actor"))


def take_weights(policy: LanguageModel, weights: Mapping[str, Tensor]) -> None:
    """Load weights by name into a policy; only weights that LoRA freezes may be missing.

    The policy gets the most precise dtype among the weights: a frozen vision tower, for example, has no float32 master
    weights, so the tower can be stored in 16 bits.
    """
    policy.to(reduce(torch.promote_types, (weight.dtype for weight in weights.values())))
    policy.load_state_dict(frozen_weights(policy) | dict(weights))


def export_policy(
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    merge: bool = True,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write weights, configuration, and tokenizer with its chat template; the policy is not changed.

    For a policy that reads images, the files of its image processor are copied, too. Weights are written in the dtype
    of the policy. A critic is not part of a policy.

    Args:
        policy: the policy, with or without adapters.
        tokenizer: the policy's tokenizer.
        folder: folder to create. Files of an earlier export are overwritten once the new files are complete; exporting
            a whole model also removes earlier weights and adapters.
        merge: True merges adapters into their weights and writes the whole model; False writes the adapters alone, for
            ``peft.PeftModel.from_pretrained(base, folder)``. Without adapters the whole model is always written.
        files: contents of additional text files by name, such as the prompt settings of the policy.

    Raises:
        OSError: writing failed, for example on a full disk. An earlier export is unchanged, a new folder is removed.
    """
    draft, whole, new = folder / DRAFT, merge or not has_adapters(policy.lm), not folder.exists()
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    draft.mkdir(parents=True)
    try:
        _write(policy, tokenizer, draft, merge)
        for name, text in (files or {}).items():
            (draft / name).write_text(text, encoding="utf-8")
        # From older files, transformers would load earlier adapters, or a single weight file instead of new shards.
        if whole:
            for file in folder.iterdir():
                if file.name in ADAPTER_FILES or WEIGHT_FILES.fullmatch(file.name):
                    file.unlink()
        for file in sorted(draft.iterdir()):
            if (folder / file.name).is_dir():  # a subfolder of the draft holds further chat templates
                shutil.rmtree(folder / file.name)
            file.replace(folder / file.name)
    except BaseException as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SafetensorError):
            raise OSError(f"'{folder}' cannot be written: {error}") from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # free the space, which matters on a full disk


def _write(policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, folder: Path, merge: bool) -> None:
    if not has_adapters(policy.lm):
        _save_model(policy.lm, folder)
    elif merge:
        _save_model(merge_adapters(policy.lm), folder)
    else:
        save_adapters(policy.lm, folder)
    tokenizer.save_pretrained(folder)
    if policy.image_reader is not None:
        for name in IMAGE_FILES:
            file = cached_file(policy.image_reader.folder, name, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                shutil.copyfile(file, folder / name)


def _save_model(lm: PreTrainedModel, folder: Path) -> None:
    """Save a model with its generation config unchanged.

    transformers loads contradictory settings, such as a temperature without ``do_sample``, but refuses to save a model
    with such settings.
    """
    settings = lm.generation_config
    lm.generation_config = GenerationConfig()
    try:
        lm.save_pretrained(folder)
    finally:
        lm.generation_config = settings
    settings.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def save_adapters(lm: PreTrainedModel, folder: Path) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``.

    For a sharded model, only the adapters are gathered; every rank must call this.
    """
    import peft

    (name,) = lm.peft_config
    weights = peft.get_peft_model_state_dict(lm, adapter_name=name, save_embedding_layers=False)
    # A PeftModel holds the plain model two levels down, and adapter files use the PeftModel's weight names.
    named = {f"base_model.model.{key}": _whole(weight).contiguous() for key, weight in weights.items()}
    save_file(named, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
    config = lm.peft_config[name]
    config.inference_mode = True  # peft's own save_pretrained sets this, too
    config.save_pretrained(folder)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
