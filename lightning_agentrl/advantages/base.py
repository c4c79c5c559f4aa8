"""The base class of advantage estimators, which declare the quantities that they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_agentrl.types import ForkPlan, Rollout
from lightning_agentrl.types.rollout import Reduce


class AdvantageEstimator(ABC):
    """Base class of estimators, which compute advantages and returns of a scored rollout.

    Class attributes declare what the agent must compute or collect; the agent computes nothing else.

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained action tokens of all ranks. The
            agent applies this to the result of :meth:`estimate`; returns are not changed.
    """

    needs_values: ClassVar[bool] = False  # a critic's values at tokens and of states where the rollout is cut
    needs_groups: ClassVar[bool] = False  # several episodes per start state
    needs_sum_pi_squared: ClassVar[bool] = False  # sum over the vocabulary of squared probabilities at each token
    needs_greedy_baseline: ClassVar[bool] = False  # a greedy episode per start state
    needs_forks: ForkPlan | None = None  # continuations from the states of the rollout; None: no continuations
    turn_discount: float = 1.0  # discount from the last token of a turn to the next turn, in a critic's targets
    token_discount: float = 1.0  # discount from token to token of a turn, in a critic's targets
    divide_by_std: bool = False  # whether differences in a group are divided by its standard deviation
    needs_nonnegative_scores: ClassVar[bool] = False  # the rewards of an episode must not sum to less than 0

    whiten: bool = True  # default for subclasses whose constructor does not call ``super().__init__``

    def __init__(self, whiten: bool = True) -> None:
        self.whiten = whiten

    @abstractmethod
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [B, A] in float32 or better, 0 off the action mask, before whitening.

        Args:
            rollout: rollout with everything that the class attributes declare. All episodes of a group are on one rank.
            reduce: function that sums a small float64 tensor over ranks. An estimator must call ``reduce`` equally
                often on every rank, even on ranks without tokens. None means that there is only one rank.

        Raises:
            ValueError: the rollout lacks something that the class attributes declare.
        """

    def check(self, rollout: Rollout) -> None:
        """Raise a ValueError that names all declared quantities that the rollout lacks, if any."""
        needed: dict[str, Tensor | None] = {}
        if self.needs_values:
            needed |= {"scores.values": rollout.scores.values, "bootstrap_values": rollout.bootstrap_values}
        if self.needs_groups:
            needed |= {"groups": rollout.groups}
        if self.needs_sum_pi_squared:
            needed |= {"scores.sum_pi_squared": rollout.scores.sum_pi_squared}
        if self.needs_greedy_baseline:
            needed |= {"greedy_scores": rollout.greedy_scores}
        if self.needs_forks is not None:
            needed |= {"state_values": rollout.state_values, "forked_end_values": rollout.forked_end_values}
        missing = [name for name, tensor in needed.items() if tensor is None]
        if missing:
            hint = "; values come from a critic, set model.init_args.critic" if self.needs_values else ""
            raise ValueError(f"{type(self).__name__} needs {' and '.join(missing)}, which the rollout lacks{hint}")


def estimated(estimator: AdvantageEstimator, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of :meth:`AdvantageEstimator.estimate`.

    Raises:
        TypeError: the estimator changed the rollout in place; the message names the class.
    """
    tensors = {name: x for name, x in rollout.tensors.items() if not x.is_inference()}
    before = [x._version for x in tensors.values()]
    returned = estimator.estimate(rollout, reduce)
    if changed := [name for (name, x), version in zip(tensors.items(), before, strict=True) if x._version != version]:
        raise TypeError(
            f"estimate of {type(estimator).__name__} changes {' and '.join(changed)} of the rollout in place, which "
            "other code reads; make it compute new tensors (key model.init_args.advantage)"
        )
    return returned


def token_rewards(rollout: Rollout) -> Tensor:
    """Return the rewards [B, A] for estimators: shaped rewards if there are any, else the environment's."""
    return rollout.rewards if rollout.shaped_rewards is None else rollout.shaped_rewards


def check_fractions(estimator: AdvantageEstimator, **numbers: float) -> None:
    """Raise a ValueError for arguments outside [0, 1], such as discounts."""
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{type(estimator).__name__}: {name} must lie between 0 and 1, got {value}")


def check_positive(estimator: AdvantageEstimator, **numbers: float) -> None:
    """Raise a ValueError for arguments that are not above 0."""
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{type(estimator).__name__}: {name} must be above 0, got {value}")
