"""Weights of a policy as files for servers: each version in a separate folder, which is published atomically."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.weights import merged_weights, named_as_in_files
from lightning_agentrl.errors import ConfigError, one_line


class SharedWeights:
    """Folders of weights, of which only the newest is kept.

    Args:
        parent: folder in which the folders are created; None: the system's folder for temporary files.

    Raises:
        ConfigError: no folder can be created in ``parent``.
    """

    def __init__(self, parent: str | None) -> None:
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="weights-", dir=parent)).resolve()
            self.folder.chmod(0o755)  # servers may run under another user
        except OSError as error:
            raise _cannot_write(parent, error) from error

    def write(self, lm: PreTrainedModel, version: str) -> Path:
        """Write all weights, with adapters merged, and return the folder to load.

        Servers that are still loading the previous version can finish: open files stay readable.

        Raises:
            ConfigError: the disk is full, or the folder is gone.
        """
        draft = self.folder / f".{version}"
        try:
            draft.mkdir()
            save_file(_separate(lm), draft / "model.safetensors", metadata={"format": "pt", "version": version})
            done = draft.rename(self.folder / version)
        except (OSError, SafetensorError) as error:
            raise _cannot_write(self.folder, error) from error
        for older in self.folder.iterdir():
            if older != done:  # NFS keeps a folder that a server reads; that folder is removed after the next update
                shutil.rmtree(older, ignore_errors=True)
        return done

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _cannot_write(folder: object, error: Exception) -> ConfigError:
    why = one_line(str(error))
    return ConfigError(
        f"the weights for the servers cannot be written into {folder} ({why}); change {KEY}.weights_folder"
    )


def _separate(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights in main memory by name. Tied weights are copied, since files cannot contain shared tensors."""
    weights, seen = dict[str, Tensor](), set[int]()
    for name, weight in named_as_in_files(lm, merged_weights(lm)):
        own = weight.cpu().contiguous()
        weights[name] = own.clone() if own.data_ptr() in seen else own
        seen.add(weights[name].data_ptr())
    return weights
