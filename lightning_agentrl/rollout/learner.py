"""What the data module asks of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.engines import PolicyHandle
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.stream import Learner


class RolloutLearner(Learner, Protocol):
    """An agent that a data module is connected to."""

    clock: StageClock
    tokenizer: PreTrainedTokenizerBase
    temperature: float

    @property
    def needs_greedy_baseline(self) -> bool: ...

    @property
    def policy_version(self) -> int: ...

    def policy_handle(self, close_ids: Sequence[int]) -> PolicyHandle: ...
