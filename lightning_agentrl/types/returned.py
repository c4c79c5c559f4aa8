"""What a part that somebody has written returns, told so that the part is named and not the line that stumbles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from torch import Size, Tensor


def per_token(returned: object, mask_BA: Tensor, method: Callable[..., object], key: str = "") -> Tensor:
    """Return the numbers [B, A] that a method gave for action tokens.

    Args:
        returned: what it gave.
        mask_BA: of the tokens.
        method: to be named; of a class, unless somebody has put a function in its place.
        key: of a config, where an object of that class was given.

    Raises:
        TypeError: it is something else.
    """
    if is_tensor_of(returned, mask_BA.shape):
        return returned
    *owners, name = getattr(method, "__qualname__", type(method).__name__).split(".")
    owner = f" of {owners[-1]}" if owners and owners[-1] != "<locals>" else ""
    raise TypeError(
        f"{name}{owner} must return one tensor {list(mask_BA.shape)}, a number for each token, got "
        f"{in_words(returned)}{key and f' (key {key})'}"
    )


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
