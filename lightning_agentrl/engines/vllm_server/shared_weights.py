"""The weights of a policy as files that servers load: each version in a folder of its own, whole once it is there."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.engines.vllm.start import KEY
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from lightning_agentrl.engines.weights import named_weights, whole
from lightning_agentrl.errors import ConfigError, one_line


@dataclass(frozen=True)
class Written:
    """Weights in a folder."""

    folder: Path

    @property
    def needs(self) -> str:
        return f"see the folder {self.folder} ({KEY}.weights_folder)"

    async def bring(self, server: VLLMServer, before: str) -> None:
        await server.call_workers("reload_weights", weights_path=str(self.folder))


class SharedWeights:
    """Folders of weights, of which the newest is kept.

    Args:
        parent: where they are made; None for a folder for temporary files.

    Raises:
        ConfigError: nothing can be made there.
    """

    def __init__(self, parent: str | None) -> None:
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="weights-", dir=parent)).resolve()
            self.folder.chmod(0o755)  # servers may run under another user
        except OSError as error:
            raise _no_place(parent, error) from error

    def deliver(self, lm: PreTrainedModel, version: str) -> Written:
        """Write all weights, for servers to load. Raises ConfigError as :meth:`write` does."""
        return Written(self.write(lm, version))

    def write(self, lm: PreTrainedModel, version: str) -> Path:
        """Write all weights, with adapters added to what they belong to; gives the folder to load.

        Servers that still load the version before can finish: open files stay readable.

        Raises:
            ConfigError: the folder is full or gone.
        """
        draft = self.folder / f".{version}"
        try:
            draft.mkdir()
            save_file(_apart(whole(lm)), draft / "model.safetensors", metadata={"format": "pt", "version": version})
            done = draft.rename(self.folder / version)
        except (OSError, SafetensorError) as error:
            raise _no_place(self.folder, error) from error
        for older in self.folder.iterdir():
            if older != done:
                shutil.rmtree(older)
        return done

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _no_place(folder: object, error: Exception) -> ConfigError:
    told = one_line(str(error))
    return ConfigError(
        f"the weights for the servers cannot be written into {folder} ({told}); change {KEY}.weights_folder"
    )


def _apart(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Weights by name in main memory; one with several names is there under each, as a file cannot share them."""
    weights, seen = dict[str, Tensor](), set[int]()
    for name, weight in named_weights(lm):
        own = weight.cpu().contiguous()
        weights[name] = own.clone() if own.data_ptr() in seen else own
        seen.add(weights[name].data_ptr())
    return weights
