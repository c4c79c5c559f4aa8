"""What a part that somebody has written returns, told so that the part is named and not the line that stumbles."""

from __future__ import annotations

from typing import TypeGuard

from torch import Size, Tensor


def is_tensor_of(returned: object, shape: Size) -> TypeGuard[Tensor]:
    """Return whether it is a tensor of this shape. Another one would be broadcast, or fail later."""
    return isinstance(returned, Tensor) and returned.shape == shape


def in_words(returned: object) -> str:
    """Return what it is, for a message: a tensor's shape, the parts of a tuple or list, else the name of its class."""
    if isinstance(returned, Tensor):
        return f"a tensor {list(returned.shape)}"
    if isinstance(returned, tuple | list):
        return f"({', '.join(map(in_words, returned))})"
    return type(returned).__name__
