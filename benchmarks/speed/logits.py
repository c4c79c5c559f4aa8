"""How large the tensors over the vocabulary are."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

VOCABULARY, HIDDEN = 49_152, 576  # of the demo model


class LargestLogits(TorchDispatchMode):
    """Sees every tensor that is made inside, in the backward pass too; remembers the largest one of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_iter(made):
            if isinstance(x, torch.Tensor) and x.shape[-1:] == (VOCABULARY,) and x.shape[-2:-1] != (HIDDEN,):
                self.bytes = max(self.bytes, x.numel() * x.element_size())  # the other one is the head, transposed
        return made
