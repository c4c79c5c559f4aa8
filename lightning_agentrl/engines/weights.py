"""The weights of a policy under the names of its files, as other engines read them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name; one with several names under each of them.

    An output head that is tied to the embedding is named too, since an engine may keep a packed copy of it.
    """
    for name, weight in lm.named_parameters(remove_duplicate=False):
        yield name, weight.detach()
