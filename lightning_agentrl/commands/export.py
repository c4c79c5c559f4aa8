"""`agentrl export`: from a checkpoint of a run to a folder that transformers or peft load."""

from __future__ import annotations

from pathlib import Path

from lightning_agentrl.agents.saved_policy import find_policy
from lightning_agentrl.commands.files import naming_argument
from lightning_agentrl.models.export import DRAFT, export_policy


def export_checkpoint(checkpoint: Path, folder: Path, merge: bool | None = None, model: str | None = None) -> str:
    """Write the policy of a checkpoint as a transformers folder.

    It has the tokenizer, the dtype that the policy was trained in, and beside the weights how the policy is prompted.

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
    with naming_argument():
        saved = find_policy(checkpoint, model)
        if saved.lora is None and merge is not None:
            raise ValueError(f"the checkpoint '{checkpoint}' has no adapters; leave out --merge")
        policy = saved.load()
    files = {} if saved.settings is None else saved.settings.as_file()
    export_policy(policy, saved.tokenizer, folder, merge=merge is not False, files=files)
    return f"written to {folder}"
