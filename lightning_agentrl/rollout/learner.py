"""The interface between data module and agent: what the data module and its stream ask of the agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.engines import PolicyHandle
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.types import ForkPlan, Rollout
from lightning_agentrl.types.model_input import ImageReader


@dataclass(frozen=True)
class Prepared:
    """A rollout with advantages and returns, and the numbers to be logged with its first step."""

    rollout: Rollout
    metrics: dict[str, float]


class Learner(Protocol):
    """An agent as the data module sees it."""

    clock: StageClock
    tokenizer: PreTrainedTokenizerBase
    image_reader: ImageReader | None  # None: it reads text only
    context_length: int  # tokens that all models can read
    temperature: float  # of sampling

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each group needs one more episode, played without randomness."""

    @property
    def needs_forks(self) -> ForkPlan | None:
        """Which states of a rollout are valued by playing on from them; None: none."""

    @property
    def policy_version(self) -> int:
        """Attempted optimizer steps behind the current weights; those that a guard skipped count too."""

    @property
    def held_steps(self) -> range:
        """Numbers of those attempts that leave the policy as it is, since the critic alone is trained."""

    def policy_handle(self, stop_token_ids: Sequence[int]) -> PolicyHandle:
        """Return what an engine needs of the policy."""

    def prepare(self, rollout: Rollout) -> Prepared:
        """Score a rollout and estimate its advantages and returns."""

    def prove_engine(self) -> None:
        """Compare the engine with the policy before the first rollout; the engine has taken over the weights.

        Raises:
            EngineMismatchError: it samples from something else.
        """

    def probe_engine(self) -> None:
        """Compare a few tokens before a rollout whose own log-probs will not tell.

        Raises:
            EngineMismatchError: it samples from something else.
        """
