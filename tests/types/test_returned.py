"""What a method returns instead of numbers for tokens is told with the name of the method."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_agentrl.losses import Reinforce
from lightning_agentrl.types.rollout import per_token

in_a_module = lambda batch: None  # noqa: E731


def none(*args: Any) -> None:
    """Return what no method may."""


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (Reinforce().token_loss, "token_loss of Reinforce"),
        (none, "none"),
        (in_a_module, "<lambda>"),
        (lambda batch: None, "<lambda>"),
        (partial(none, 1), "partial"),
    ],
)
def test_also_a_function_that_was_put_in_place_of_a_method_is_named(method: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"^{named} must return one tensor \[2, 3\], .* got NoneType$"):
        per_token(None, torch.ones(2, 3), method)
