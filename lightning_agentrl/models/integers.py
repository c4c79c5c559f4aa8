"""Lists of integers as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_agentrl.types.transfer import to_device


def integers(numbers: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of int64. Of long lists, numpy makes one in a third of the time that torch takes."""
    return to_device(torch.from_numpy(np.array(numbers, dtype=np.int64)), device)
