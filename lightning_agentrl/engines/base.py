"""Base class of engines, which sample replies, and the request and reply that they exchange with the caller."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch

from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.sharding import gathered
from lightning_agentrl.types.model_input import ModelInput


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A request for one reply.

    Sampling uses the whole distribution (no top-p, no top-k), so log-probs describe the distribution that the tokens
    were sampled from. Equal prompts, seeds and weights give equal replies, up to rounding, regardless of the rest of
    the batch.
    """

    prompt: ModelInput
    max_tokens: int
    temperature: float  # 0: greedy, always the most likely token
    seed: int
    number: tuple[int, ...] = ()  # indices of environment and turn, by which requests of equal age are ordered
    stop: tuple[str, ...] = ()  # texts that also end the reply; the first complete stop text ends it


@dataclass(frozen=True, slots=True)
class Reply:
    """The sampled ids, their log-probs in nats after temperature, and whether a stop token ended the reply."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    closed: bool  # False: the reply was cut by ``max_tokens``
    policy_version: int
    late: bool = False  # the environment exceeded its time limit, so the composition of the batch depended on time


@dataclass(frozen=True)
class PolicyHandle:
    """What the trainer hands to an engine: the policy, its stop tokens, and the precision to run the policy in."""

    policy: LanguageModel
    stop_token_ids: Sequence[int]
    precision: Callable[[], AbstractContextManager]
    max_model_len: int | None = None  # largest number of tokens of prompt and reply; None: the model's context length
    trained_meanwhile: bool = False  # whether the policy is trained while replies are sampled
    decode: Callable[[Sequence[int]], str] = str  # returns the text of sampled ids, for requests with ``stop``

    def gathered(self) -> AbstractContextManager[None]:
        """Hold all weights of the policy on this rank; all ranks enter and leave together."""
        return gathered(self.policy)

    @property
    def window(self) -> int:
        """The largest number of tokens of a prompt and its reply together."""
        context = self.policy.context_length
        return min(context, self.max_model_len or context)

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype in which the trainer scores and trains the policy."""
        return self.rounds_to or self.policy.lm.dtype

    @property
    def rounds_to(self) -> torch.dtype | None:
        """The dtype to which autocast rounds weights; None without autocast."""
        device = self.policy.lm.device.type
        with self.precision():
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy whose weights have not been loaded, for memory estimates.

    Args:
        model: model on the meta device.
        on_gpu: whether the policy runs on a GPU rather than on the CPU.
        computes_in: dtype in which the trainer scores and trains the policy.
        window: largest number of tokens of a prompt and its reply together.
        trained_meanwhile: whether the policy is trained while replies are sampled.
    """

    model: LanguageModel
    on_gpu: bool
    computes_in: torch.dtype
    window: int
    trained_meanwhile: bool = False


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine on the policy's device, in this process.

    Args:
        resident: bytes that stay allocated during updates.
        sampling: bytes that are released before an update.
        share: fraction of a GPU's total memory that is reserved in addition to ``resident`` and ``sampling``.
        released: whether ``share`` is released before an update.
    """

    resident: int = 0
    sampling: int = 0
    share: float = 0.0
    released: bool = False


class Engine(ABC):
    """Sampler of replies for many environments at a time."""

    # True: the engine samples from a copy if ``PolicyHandle.trained_meanwhile`` is set.
    own_weights: ClassVar[bool] = False
    # True: the engine gathers a sharded policy layer by layer; False: all layers at once.
    sends_layers: ClassVar[bool] = False
    dtype: str = "auto"  # dtype in which the engine computes; auto: the trainer's dtype

    @property
    def holds_copy(self) -> bool:
        """Whether the engine has its own copy of the weights, which must be updated after each training step."""
        return True

    def check(self) -> None:  # noqa: B027 - most engines have no requirements
        """Check the engine's requirements before any weights are loaded.

        Raises:
            ImportError: a package is missing.
        """

    def memory(self, policy: PlannedPolicy, concurrency: int) -> EngineMemory:
        """Estimate the memory, in addition to the policy's, for sampling ``concurrency`` replies at once."""
        return EngineMemory()

    @abstractmethod
    def start(self, handle: PolicyHandle) -> None:
        """Start the engine, also again after :meth:`stop`; the strategy is set up and the policy on its device."""

    @abstractmethod
    def sync(self, policy_version: int) -> None:
        """Load the policy's current weights.

        The trainer calls this method before each collection and validation, when no request is in flight.
        """

    def collecting(self) -> AbstractContextManager:
        """Return a context for sampling that the trainer waits for; all ranks enter and leave the context together.

        A collection that runs while the policy is trained does not use this context.
        """
        return nullcontext()

    def seats(self, players: int) -> AbstractContextManager[Sequence[AbstractContextManager]]:
        """Return a context for one collection, which yields one inner context for each player.

        A player enters its inner context before its first request and leaves it after its last request. So an engine
        whose batches must not depend on timing can wait for these players. Other engines do not need this method.

        Args:
            players: number of players; a player is an environment that sends requests.
        """
        return nullcontext([nullcontext()] * players)

    @abstractmethod
    async def generate(self, request: SamplingRequest) -> Reply:
        """Sample one reply. Any error ends the collection.

        Raises:
            EngineGoneError: no sampler is left; the run saves a checkpoint and ends.
        """

    @abstractmethod
    def stop(self) -> None:
        """Release threads and memory; a no-op if the engine is not started."""


@dataclass(eq=False)
class Waiting:
    """A request from a caller on an event loop. Its reply is sampled in another thread."""

    request: SamplingRequest
    future: asyncio.Future[Reply]  # belongs to the caller's event loop

    def tell(self, outcome: Reply | Exception) -> None:
        """Pass the outcome to the caller. Can be called from any thread."""
        tell_all([(self, outcome)])


def tell_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    """Pass outcomes to their callers in order, with one call per event loop. Can be called from any thread."""
    for loop, of_loop in groupby(outcomes, key=lambda one: one[0].future.get_loop()):
        with suppress(RuntimeError):  # a closed loop has no waiting callers, and the worker must go on
            loop.call_soon_threadsafe(_settle_all, list(of_loop))


def _settle_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    for waiting, outcome in outcomes:
        if waiting.future.done():  # the request was canceled, or has failed because the engine ended
            continue
        if isinstance(outcome, StopIteration):  # a future does not accept StopIteration
            outcome = RuntimeError(f"StopIteration: {outcome}")
        if isinstance(outcome, Exception):
            waiting.future.set_exception(outcome)
            # Mark the error as retrieved, so that asyncio logs nothing if the caller has ended.
            waiting.future.exception()
        else:
            waiting.future.set_result(outcome)
