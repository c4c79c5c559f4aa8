"""Critics, which compute values: one interface, chosen in YAML, built once the actor is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.language_model import hidden_at_logit_positions
from lightning_agentrl.models.packing import Packed


class ValueHead(nn.Module):
    """Linear head on hidden states, in float32 or better; outputs 0 everywhere at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast as any module, but never to 16 bits."""
        exact = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        if self.linear.weight.dtype.itemsize < 4:
            self.float()
            self.load_state_dict(exact)
        return self

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """[R]"""
        with torch.autocast(hidden_RH.device.type, enabled=False):
            return self.linear(hidden_RH.to(self.linear.weight.dtype)).sum(-1)  # of one number; [:, 0] would be a view


class Critic(nn.Module, ABC):
    """A module that computes values of states at the logit positions.

    ``shares_trunk`` says whether the critic reads the actor's hidden states (one forward pass for both) or has its
    own backbone (its micro-batches run after the actor's, so only one graph is alive at a time).
    """

    shares_trunk: bool

    @property
    def shares_prefixes(self) -> bool:
        """Whether the critic's own backbone, if any, can read rows as a prefix tree."""
        return True

    @abstractmethod
    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        """Create the weights. ``load(None)`` loads the actor's model, with LoRA as adapters on its frozen base."""

    @abstractmethod
    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        """Return values [R]; ``actor_hidden_RH`` is given if ``shares_trunk``."""


class SharedCritic(Critic):
    """Value head on the actor's trunk: half the memory and time, but both losses train one trunk.

    Args:
        detach: stop the gradient of the value loss before the trunk.
    """

    shares_trunk = True

    def __init__(self, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        self.head = ValueHead(actor_hidden_size)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        if actor_hidden_RH is None:
            raise ValueError("SharedCritic reads the actor's hidden states, but none were given")
        return self.head(actor_hidden_RH.detach() if self.detach else actor_hidden_RH)


class SeparateCritic(Critic):
    """A backbone of its own with a value head, as in the published recipe.

    Args:
        model: hub id or folder of the backbone, all of which is trained; the actor's model when not given, with LoRA as
            adapters on its base.
    """

    shares_trunk = False

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self.model = model

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        lm = load(self.model)
        self.backbone = lm
        self.head = ValueHead(int(lm.config.get_text_config().hidden_size))
        output = lm.get_output_embeddings()
        if output is not None and output.weight is not lm.get_input_embeddings().weight:
            lm.set_output_embeddings(nn.Identity())  # the vocabulary projection of a critic is never used

    @property
    def shares_prefixes(self) -> bool:
        return not why_unshared(self.backbone.config)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        return self.head(hidden_at_logit_positions(self.backbone, packed))
