"""Critics, their value heads, and the least-squares regression of values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_agentrl.models.families import why_unshared
from lightning_agentrl.models.language_model import hidden_at_logit_positions
from lightning_agentrl.models.loading import model_name
from lightning_agentrl.models.packing import Packed

LEAST_STD = 1e-4  # lower bound; the standard deviation of equal returns is 0


class ValueHead(nn.Module):
    """Linear head on hidden states, in float32 or better; initialized to output 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast like any module, but never to 16 bits."""
        exact = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        super()._apply(fn, recurse)
        if self.linear.weight.dtype.itemsize < 4:
            self.float()
            self.load_state_dict(exact)
        return self

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """Return values [R] of hidden states [R, H]."""
        with torch.autocast(hidden_RH.device.type, enabled=False):
            # The last dimension has size 1; `sum` returns a new tensor, whereas [:, 0] would return a view.
            return self.linear(hidden_RH.to(self.linear.weight.dtype)).sum(-1)


class PopArtHead(ValueHead):
    """Value head that learns normalized returns: (return - running mean) / running standard deviation (PopArt).

    When mean and standard deviation change, the weights are rescaled so that all predicted values stay the same. The
    scale of the rewards then affects neither how fast values are learned nor, on a shared trunk, the weight of the
    value loss.

    Args:
        hidden_size: size of the hidden states, H.
        step: step size of the running mean and standard deviation, above 0 and at most 1; the first rollout sets both.

    Source: van Hasselt et al. 2016 (arXiv 1602.07714), with running means divided by the sum of their weights.
    """

    mean: Tensor  # [], running mean of the returns
    std: Tensor  # [], running standard deviation of the returns
    weight: Tensor  # [], sum of the weights of all rollouts in the running means

    def __init__(self, hidden_size: int, step: float) -> None:
        super().__init__(hidden_size)
        self.step = step
        for name, first in (("mean", 0.0), ("std", 1.0), ("weight", 0.0)):
            self.register_buffer(name, torch.tensor(first, dtype=self.linear.weight.dtype))

    def normalize(self, values: Tensor) -> Tensor:
        """Normalize values or returns of any shape."""
        return (values - self.mean) / self.std

    @torch.no_grad()
    def follow(self, mean: float, std: float) -> None:
        """Update the running statistics by the statistics of a rollout's returns; ranks must pass equal values."""
        old_mean, old_std, first = float(self.mean), float(self.std), not self.weight
        self.weight.lerp_(torch.ones_like(self.weight), self.step)
        # The first share is exactly 1, since rounding would leave a trace of the initial standard deviation of 1.
        share = 1.0 if first else self.step / float(self.weight)
        spread = (1 - share) * (old_std**2 + share * (mean - old_mean) ** 2) + share * std**2
        self.mean.add_(share * (mean - old_mean))
        self.std.fill_(max(spread**0.5, LEAST_STD))
        ratio = old_std / float(self.std)
        self.linear.weight.mul_(ratio)
        self.linear.bias.mul_(ratio).add_((old_mean - float(self.mean)) / float(self.std))

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """Return values [R] of hidden states [R, H], on the scale of the returns."""
        return super().forward(hidden_RH) * self.std + self.mean


def value_head(hidden_size: int, popart: float | None) -> ValueHead:
    """Return a new value head.

    Args:
        hidden_size: size of the hidden states, H.
        popart: argument ``step`` of :class:`PopArtHead`; None: a linear head.
    """
    return ValueHead(hidden_size) if popart is None else PopArtHead(hidden_size, popart)


def popart_head(critic: nn.Module | None) -> PopArtHead | None:
    """Return the PopArt head of a critic, or None if the critic has no PopArt head."""
    parts = () if critic is None else critic.modules()
    return next((part for part in parts if isinstance(part, PopArtHead)), None)


def follow_returns(critic: nn.Module | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """Update a critic's PopArt head by the returns of a rollout, and return its running mean and deviation as metrics.

    Args:
        critic: any critic or None; without a PopArt head nothing happens.
        metrics: metrics of the rollout over all ranks.
    """
    head, std = popart_head(critic), metrics.get("critic/return_std", math.nan)
    if head is None or not math.isfinite(std):
        return {}
    head.follow(metrics["critic/return_mean"], std)
    return {"critic/popart_mean": float(head.mean), "critic/popart_std": float(head.std)}


class RunningRegression(nn.Module):
    """Ridge regression of a scalar target on hidden states, over all examples so far; outputs 0 before the first fit.

    Sums are kept in float64 whatever the precision of the models, and do not depend on how examples are split into
    batches.

    Args:
        size: size of a state, H.
        ridge: penalty on the squared weights, in units of the mean squared distance of states from their mean. A value
            of 1 assumes that states explain half of the variance of the targets; larger values assume less.

    Source: Hoerl and Kennard 1970, with exponential forgetting as in recursive least squares.
    """

    moments: Tensor  # [H + 2, H + 2], discounted sum over examples of z z^T with z = (state, 1, target)
    weights: Tensor  # [H]
    constant: Tensor  # []

    def __init__(self, size: int, ridge: float) -> None:
        super().__init__()
        self.ridge = ridge
        exact = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("moments", torch.zeros(size + 2, size + 2, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(size, dtype=exact))
        self.register_buffer("constant", torch.zeros((), dtype=exact))
        self._new: Tensor | None = None  # moments of the examples since the last fit

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move like any module, but never cast."""
        exact = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def forward(self, states_RH: Tensor) -> Tensor:
        """Return the predicted targets [R] at states [R, H], without gradients."""
        with torch.autocast(states_RH.device.type, enabled=False):
            return states_RH.detach().to(self.weights.dtype) @ self.weights + self.constant

    @torch.no_grad()
    def take_in(self, states_NH: Tensor, numbers_N: Tensor) -> None:
        """Add examples for the next fit: states [N, H] and their targets [N]."""
        numbers_N = numbers_N.to(self.moments)
        seen = torch.cat([states_NH.to(self.moments), torch.ones_like(numbers_N)[:, None], numbers_N[:, None]], 1)
        new = seen.T @ seen
        self._new = new if self._new is None else self._new + new

    @torch.no_grad()
    def fit(self, total: Callable[[Tensor], Tensor], keep: float) -> None:
        """Discount the sums, add the examples since the last fit, and solve for the weights.

        Args:
            total: function that sums a tensor over all ranks; every rank must call ``fit``.
            keep: discount factor of the earlier sums, from 0 to 1.
        """
        new = total(torch.zeros_like(self.moments) if self._new is None else self._new)
        self._new = None
        self.moments.mul_(keep).add_(new.to(self.moments))
        count = float(self.moments[-2, -2])
        if not count > 0:
            return
        mean_z = self.moments[-2] / count
        about = self.moments / count - torch.outer(mean_z, mean_z)  # covariances
        apart = float(about[:-2, :-2].diagonal().clamp_min(0).sum())
        weights_H = torch.zeros_like(mean_z[:-2])
        if apart > 0:
            penalty = self.ridge * apart / count * torch.eye(len(weights_H)).to(about)
            weights_H = torch.linalg.solve(about[:-2, :-2] + penalty, about[:-2, -1])
        self.weights.copy_(weights_H)
        self.constant.copy_(mean_z[-1] - mean_z[:-2] @ weights_H)

    def forget_new(self) -> None:
        """Drop the examples since the last fit."""
        self._new = None


class Critic(nn.Module, ABC):
    """Base class of critics, which compute values of states at the logit positions.

    ``shares_trunk`` says whether the critic reads the actor's hidden states (one forward pass for both) or has its
    own backbone (its micro-batches run after the actor's, so only one graph is alive at a time). A critic that shares
    the trunk may set ``fitted``: the critic then learns by :meth:`take_in` and :meth:`fit` instead of the gradient of
    the value loss. Its examples are the states in which turns begin, and the value of such a state is used for all
    tokens of its turn.
    """

    shares_trunk: bool
    fitted: ClassVar[bool] = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether the critic's own backbone, if any, can read rows as a prefix tree."""
        return True

    @abstractmethod
    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        """Create the weights.

        Args:
            actor_hidden_size: size of the actor's hidden states, H.
            load: function that loads a model by name; ``load(None)`` loads the actor's model, which under LoRA means
                new adapters on the actor's frozen base.
        """

    @abstractmethod
    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        """Return values [R]; ``actor_hidden_RH`` is given if ``shares_trunk``."""

    def take_in(self, states_NH: Tensor, returns_N: Tensor) -> None:
        """Add the turns of a micro-batch as examples for the next fit; called if ``fitted``.

        Args:
            states_NH: hidden states of the actor in which turns begin, without gradients.
            returns_N: returns that the values of these states should predict.
        """

    def fit(self, total: Callable[[Tensor], Tensor] | None, new_policy: bool) -> None:
        """Learn from the examples since the last fit; called after each step if ``fitted``.

        Args:
            total: function that sums a tensor over all ranks; None: drop the new examples, since they contain values
                that are not finite.
            new_policy: whether the new examples come from a different policy than earlier examples.
        """


def values_of(critic: Critic, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
    """Return the values [R] of a critic; arguments as in :meth:`Critic.forward`."""
    # The reshape raises an error if a critic does not return exactly one value per position.
    return critic(packed, actor_hidden_RH).reshape(packed.logit_positions.shape)


class SharedCritic(Critic):
    """Value head on the actor's trunk: half the memory and time, but both losses train one trunk.

    Args:
        popart: step size of PopArt's running mean and standard deviation of returns, above 0 and at most 1; None:
            returns are not normalized.
    """

    shares_trunk = True

    def __init__(self, popart: float | None = None) -> None:
        super().__init__()
        _check_popart(popart)
        self.popart = popart

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        self.head = value_head(actor_hidden_size, self.popart)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        assert actor_hidden_RH is not None
        return self.head(actor_hidden_RH)


class LeastSquaresCritic(Critic):
    """Critic without a learning rate: ridge regression of returns on the actor's hidden states, solved after each step.

    Each fit is the best linear head for the data so far and costs almost nothing; a gradient step would only move
    toward this head. The trunk is trained by the policy loss alone. The critic reads the states in which turns begin;
    the value of such a state is used for all tokens of its turn. ``optim.lr_critic``, ``value_clip`` and
    ``first_token_weight`` have no effect. The sums take (H + 2)² float64 values on each device.

    Args:
        forget: fraction of the sums, from 0 to 1, to forget in each iteration that trains the policy.
        ridge: penalty on the squared weights, above 0, in units of the mean squared distance of states from their mean.
            A value of 1 assumes that states explain half of the variance of the returns; larger values assume less.
    """

    shares_trunk = True
    fitted = True

    def __init__(self, forget: float = 0.8, ridge: float = 1.0) -> None:
        super().__init__()
        key = "model.init_args.critic.init_args"
        if not 0 <= forget <= 1:
            raise ValueError(f"{key}.forget must be from 0 to 1, got {forget}; for example 0.8")
        if not ridge > 0:
            raise ValueError(f"{key}.ridge must be above 0, got {ridge}; for example 1.0")
        self.forget = forget
        self.ridge = ridge

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        self.regression = RunningRegression(actor_hidden_size, self.ridge)

    def forward(self, packed: Packed, actor_hidden_RH: Tensor | None) -> Tensor:
        assert actor_hidden_RH is not None
        return self.regression(actor_hidden_RH)

    def take_in(self, states_NH: Tensor, returns_N: Tensor) -> None:
        self.regression.take_in(states_NH, returns_N)

    def fit(self, total: Callable[[Tensor], Tensor] | None, new_policy: bool) -> None:
        if total is None:
            self.regression.forget_new()
        else:
            self.regression.fit(total, keep=1 - self.forget if new_policy else 1.0)


class SeparateCritic(Critic):
    """A separate backbone with a value head, as in the published recipe.

    Args:
        model: hub id or folder of the backbone, which is trained in full; None: the actor's model, which under LoRA
            means new adapters on the actor's base.
        popart: step size of PopArt's running statistics, as for :class:`SharedCritic`; None: no normalization.
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
            f"the step size of PopArt must be above 0 and at most 1, got {step}; for example 0.1 "
            "(key model.init_args.critic.init_args.popart)"
        )
