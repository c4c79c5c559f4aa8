"""Critics, which compute values: one interface, chosen in YAML, built once the actor is loaded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.language_model import hidden_at_logit_positions
from lightning_agentrl.models.loading import model_name
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.models.regression import RunningRegression
from lightning_agentrl.models.value_head import value_head
from lightning_agentrl.types.rollout import in_words, is_tensor_of


class Critic(nn.Module, ABC):
    """A module that computes values of states at the logit positions.

    ``shares_trunk`` says whether the critic reads the actor's hidden states (one forward pass for both) or has its
    own backbone (its micro-batches run after the actor's, so only one graph is alive at a time). One that shares it may
    be ``fitted``: by :meth:`take_in` and :meth:`fit`, in place of the gradient of the value loss, on the states in
    which turns begin. Their values then stand for all tokens of the turn.
    """

    shares_trunk: bool
    fitted: ClassVar[bool] = False

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

    def take_in(self, states_NH: Tensor, returns_N: Tensor) -> None:
        """Keep states in which turns began, and what followed them, of a micro-batch; called if ``fitted``.

        Args:
            states_NH: hidden states of the actor, without gradient.
            returns_N: targets of the values.
        """

    def fit(self, total: Callable[[Tensor], Tensor] | None, new_policy: bool) -> None:
        """Learn from what was taken in; called after each step if ``fitted``.

        Args:
            total: sums a tensor over all ranks; None: forget what was taken in, since its numbers are not finite.
            new_policy: what was taken in is of another policy than what was taken in before.
        """


def values_of(critic: Critic, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
    """Return the values [R] of a critic; arguments as in :meth:`Critic.forward`.

    Raises:
        TypeError: it gives something else; names its class.
    """
    values = critic(packed, actor_hidden_RH)
    if not is_tensor_of(values, packed.logit_positions.shape):
        raise TypeError(
            f"forward of {type(critic).__name__} must return one tensor {list(packed.logit_positions.shape)}, a value "
            f"for each logit position, got {in_words(values)} (key model.init_args.critic)"
        )
    return values


class SharedCritic(Critic):
    """Value head on the actor's trunk: half the memory and time, but both losses train one trunk.

    Args:
        detach: stop the gradient of the value loss before the trunk.
        popart: learn returns less their running mean, over their running standard deviation; the share of the way that
            both go to those of each rollout, above 0 and at most 1. None: learn returns as they are.
    """

    shares_trunk = True

    def __init__(self, detach: bool = False, popart: float | None = None) -> None:
        super().__init__()
        _check_popart(popart)
        self.detach = detach
        self.popart = popart

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        self.head = value_head(actor_hidden_size, self.popart)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        if actor_hidden_RH is None:
            raise ValueError("SharedCritic reads the actor's hidden states, but none were given")
        return self.head(actor_hidden_RH.detach() if self.detach else actor_hidden_RH)


class LeastSquaresCritic(Critic):
    """Ridge regression of the returns on the actor's hidden states, solved after each step: a critic without a rate.

    It learns from a rollout all that a linear head can, where a gradient takes a short step, and costs nearly nothing.
    The trunk is the policy's alone. It reads the states in which turns begin; their values stand for all tokens of the
    turn. ``optim.lr_critic``, ``value_clip`` and ``first_token_weight`` do not matter. Sums are kept in float64,
    (H + 2)² numbers on each device.

    Args:
        forget: share of the sums that each iteration in which the policy is trained forgets; from 0 to 1.
        ridge: penalty of the squared weights, above 0, in units of the mean squared distance of a state from their
            mean: with 1 it expects that states explain half of the variance of the returns, with more it expects less.
    """

    shares_trunk = True
    fitted = True

    def __init__(self, forget: float = 0.8, ridge: float = 1.0) -> None:
        super().__init__()
        key = "model.init_args.critic.init_args"
        if not 0 <= forget <= 1:
            raise ValueError(f"{key}.forget must be from 0 to 1, got {forget}; for example 0.8")
        if not 0 < ridge < math.inf:
            raise ValueError(f"{key}.ridge must be above 0, got {ridge}; for example 1.0")
        self.forget = forget
        self.ridge = ridge

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        self.regression = RunningRegression(actor_hidden_size, self.ridge)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        if actor_hidden_RH is None:
            raise ValueError("LeastSquaresCritic reads the actor's hidden states, but none were given")
        return self.regression(actor_hidden_RH)

    def take_in(self, states_NH: Tensor, returns_N: Tensor) -> None:
        self.regression.take_in(states_NH, returns_N)

    def fit(self, total: Callable[[Tensor], Tensor] | None, new_policy: bool) -> None:
        if total is None:
            self.regression.forget_new()
        else:
            self.regression.fit(total, keep=1 - self.forget if new_policy else 1.0)


class SeparateCritic(Critic):
    """A backbone of its own with a value head, as in the published recipe.

    Args:
        model: hub id or folder of the backbone, all of which is trained; the actor's model when not given, with LoRA as
            adapters on its base.
        popart: as for :class:`SharedCritic`.
    """

    shares_trunk = False

    def __init__(self, model: str | None = None, popart: float | None = None) -> None:
        super().__init__()
        _check_popart(popart)
        self.model = None if model is None else model_name(model, "model.init_args.critic.init_args.model")
        self.popart = popart

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        lm = load(self.model)
        self.backbone = lm
        self.head = value_head(int(lm.config.get_text_config().hidden_size), self.popart)
        output = lm.get_output_embeddings()
        if output is not None and output.weight is not lm.get_input_embeddings().weight:
            lm.set_output_embeddings(nn.Identity())  # the vocabulary projection of a critic is never used

    @property
    def shares_prefixes(self) -> bool:
        return not why_unshared(self.backbone.config)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        return self.head(hidden_at_logit_positions(self.backbone, packed))


def _check_popart(step: float | None) -> None:
    if step is not None and not 0 < step <= 1:
        raise ValueError(
            "the share of the way that PopArt goes to the returns of a rollout must be above 0 and at most 1, got "
            f"{step}; for example 0.1 (key model.init_args.critic.init_args.popart)"
        )
