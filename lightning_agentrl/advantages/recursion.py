"""The one backward recursion of estimators."""

from __future__ import annotations

import torch
from torch import Tensor


def backward_sum(x_NK: Tensor, decay_NK: Tensor | float = 1.0) -> Tensor:
    """Return ``y_k = x_k + decay_k y_{k+1}`` from the last column to the first, with nothing carried into the last."""
    y_KN = x_NK.T.clone(memory_format=torch.contiguous_format)  # of one row, .contiguous() would be x itself
    decay_KN = torch.as_tensor(decay_NK, dtype=x_NK.dtype, device=x_NK.device).expand(x_NK.shape).T.contiguous()
    for k in reversed(range(len(y_KN) - 1)):
        y_KN[k].addcmul_(decay_KN[k], y_KN[k + 1])
    return y_KN.T
