"""Engines: what samples tokens. One small base class; a prompt is a model input, a reply token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.types.model_input import ModelInput


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One reply to be sampled.

    Sampling uses the whole distribution (no top-p, no top-k), so that log-probs describe what was sampled from.
    Equal prompt, seed and weights give equal replies, whatever else is sampled at the same time (up to rounding).
    """

    prompt: ModelInput
    max_tokens: int
    temperature: float  # 0: the most likely token every time
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, ModelInput):
            raise TypeError(
                f"a sampling request needs a ModelInput as prompt, got a {type(self.prompt).__name__}; "
                "ModelInput.of_ids makes one of token ids"
            )
        if not self.prompt or self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(
                "a sampling request needs a prompt, max_tokens of at least 1 and a temperature of at least 0, got "
                f"{len(self.prompt)} prompt ids, max_tokens {self.max_tokens} and temperature {self.temperature}"
            )


@dataclass(frozen=True, slots=True)
class Reply:
    """The sampled ids, the log-probs of exactly those ids after temperature, and whether the reply closed itself."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    closed: bool  # False: cut by ``max_tokens``
    policy_version: int


@dataclass(frozen=True)
class PolicyHandle:
    """What an engine needs of the trainer: the policy in place, its stop tokens, and the precision to run it in.

    Inside ``gathered()`` this rank holds all weights of the policy; all ranks enter and leave together.
    """

    policy: LanguageModel
    stop_token_ids: Sequence[int]
    precision: Callable[[], AbstractContextManager]
    gathered: Callable[[], AbstractContextManager] = nullcontext
    max_model_len: int | None = None  # tokens of a prompt and its reply, at most; None: the model's context
    trained_meanwhile: bool = False  # the policy changes while replies are sampled

    @property
    def window(self) -> int:
        """Tokens of the longest prompt and its reply."""
        context = self.policy.context_length
        return min(context, self.max_model_len or context)

    @property
    def computes_in(self) -> torch.dtype:
        """What the trainer scores and trains the policy in."""
        device = self.policy.lm.device.type
        with self.precision():
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.policy.lm.dtype


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the policy's device, in this process."""

    resident: int = 0  # during updates too
    sampling: int = 0  # given back before an update


class Engine(ABC):
    """Samples replies for many environments at a time."""

    own_weights: ClassVar[bool] = False  # samples from a copy where ``PolicyHandle.trained_meanwhile`` is set

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Look for what the engine needs, before any weights are read.

        Raises:
            ImportError: a package is missing.
        """

    def memory(self, handle: PolicyHandle, concurrency: int) -> EngineMemory:
        """What it takes beside the policy to sample ``concurrency`` replies at once; asked before it starts."""
        return EngineMemory()

    @abstractmethod
    def start(self, handle: PolicyHandle) -> None:
        """Called once the strategy is up and the policy is on its device; again after :meth:`stop`."""

    @abstractmethod
    def sync(self, policy_version: int) -> None:
        """Take over the current weights of the policy. Called once before each collect, with nothing in flight."""

    def collecting(self) -> AbstractContextManager:
        """Entered and left by all ranks together, around everything that is sampled while the trainer waits for it.

        Not around a collection that goes on while the policy is trained.
        """
        return nullcontext()

    @abstractmethod
    async def generate(self, request: SamplingRequest) -> Reply:
        """Sample one reply."""

    @abstractmethod
    def stop(self) -> None:
        """Release threads and memory. Harmless when not started."""
