"""Checks that no file in a checkpoint folder executes code, run before torch or DeepSpeed unpickles it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

# Classes that torch.distributed.checkpoint writes to its metadata, by module.
_IN_METADATA = {
    of_torch.__name__: {
        name for name, kind in vars(of_torch).items() if getattr(kind, "__module__", "") == of_torch.__name__
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}
# Classes that DeepSpeed's ZeRO writes to its files, besides plain types.
_OF_ZERO = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # before 3.11.4, Python pickled members of enums by name
            return lambda kind, member: of_torch._MEM_FORMAT_ENCODING[member]
        if name not in _IN_METADATA.get(module, ()):
            raise _refusal(f"{module}.{name}")
        return super().find_class(module, name)


def read_metadata(file: Path) -> Metadata:
    """Read the metadata of a checkpoint folder: which tensors it holds, and where.

    Raises:
        pickle.UnpicklingError: the file is damaged, or has an object of a class that torch does not write to metadata.
    """
    with file.open("rb") as opened:
        return cast(Metadata, _MetadataReader(opened).load())


def check_folder(checkpoint: Path) -> None:
    """Refuse a checkpoint folder that holds objects other than tensors and plain types; ignore checkpoint files.

    Without ``weights_only``, torch unpickles metadata and entries other than tensors, and DeepSpeed unpickles all
    files.

    Raises:
        pickle.UnpicklingError: the folder has an object of another class; the message equals that of torch.load with
            ``weights_only``.
    """
    # Without the common metadata file, torch reads one metadata file per rank.
    for file in checkpoint.glob("*.metadata"):
        metadata = read_metadata(file)
        for index, piece in metadata.storage_data.items():
            if not isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
                with (checkpoint / piece.relative_path).open("rb") as share:
                    share.seek(piece.offset)
                    torch.load(io.BytesIO(share.read(piece.length)), map_location="cpu", weights_only=True)
    for file in checkpoint.rglob("*.pt"):
        if foreign := set(get_unsafe_globals_in_checkpoint(file)) - _OF_ZERO:
            raise _refusal(min(foreign))


def _refusal(name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"Unsupported global: GLOBAL {name}")  # same message as torch.load
