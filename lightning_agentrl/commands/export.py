"""`agentrl export`: write the policy of a checkpoint as a folder for transformers or peft."""

from __future__ import annotations

from pathlib import Path

from lightning_agentrl.agents.saved_policy import find_policy
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.models.export import DRAFT, export_policy


def export_checkpoint(checkpoint: Path, folder: Path, merge: bool | None = None, model: str | None = None) -> str:
    """Write the policy of a checkpoint as a transformers folder.

    The folder contains the tokenizer, the weights in the dtype of training, and the settings of the prompts.

    Args:
        checkpoint: checkpoint of `agentrl fit`.
        folder: output folder, which must be empty or not exist.
        merge: whether to merge adapters into the model (default), or to write only the adapters.
        model: hub id or folder of the base model, if it moved after the run.

    Returns:
        A message for the terminal.

    Raises:
        ValueError: the file is missing or not a checkpoint of `agentrl fit`, the folder is not empty, or ``merge`` is
            given without adapters.
        ImportError: the checkpoint has adapters, and peft is not installed.
    """
    if folder.exists() and (not folder.is_dir() or any(path.name != DRAFT for path in folder.iterdir())):
        raise ValueError(f"the folder '{folder}' exists and is not empty; name another one")
    with naming_argument():
        saved = find_policy(checkpoint, model)
        if saved.lora is None and merge is not None:
            raise ValueError(f"the checkpoint '{checkpoint}' has no adapters; leave out --merge")
        policy = saved.load()
    files = {} if saved.settings is None else saved.settings.as_file()
    export_policy(policy, saved.tokenizer, folder, merge=merge is not False, files=files)
    return f"written to {folder}"
