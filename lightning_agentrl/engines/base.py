"""Engines, which sample replies: one small base class. A prompt is a model input, a reply is token ids."""

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

    Sampling uses the whole distribution (no top-p, no top-k), so log-probs describe the distribution that was sampled
    from. Equal prompts, seeds and weights give equal replies, up to rounding, whatever else is sampled at the same
    time.
    """

    prompt: ModelInput
    max_tokens: int
    temperature: float  # 0: greedy, the most likely token every time
    seed: int
    number: tuple[int, ...] = ()  # of the environment and of its turn: orders requests that are equally old
    stop: tuple[str, ...] = ()  # texts that end the reply too, once one is complete


@dataclass(frozen=True, slots=True)
class Reply:
    """The sampled ids, their log-probs in nats after temperature, and whether a stop token ended the reply."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    closed: bool  # False: cut by ``max_tokens``
    policy_version: int
    late: bool = False  # its environment was over its time, so what was sampled beside it depended on that


@dataclass(frozen=True)
class PolicyHandle:
    """Access of an engine to the trainer: the policy, its stop tokens, and the precision to run it in."""

    policy: LanguageModel
    stop_token_ids: Sequence[int]
    precision: Callable[[], AbstractContextManager]
    max_model_len: int | None = None  # most tokens of a prompt with its reply; None: the model's context
    trained_meanwhile: bool = False  # the policy is trained while replies are sampled
    decode: Callable[[Sequence[int]], str] = str  # gives the text of sampled ids, for requests with ``stop``

    def gathered(self) -> AbstractContextManager[None]:
        """Hold all weights of the policy on this rank; all ranks enter and leave together."""
        return gathered(self.policy)

    @property
    def window(self) -> int:
        """The most tokens that a prompt and its reply have together."""
        context = self.policy.context_length
        return min(context, self.max_model_len or context)

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype in which the trainer scores and trains the policy."""
        return self.rounds_to or self.policy.lm.dtype

    @property
    def rounds_to(self) -> torch.dtype | None:
        """Dtype of autocast, to which it rounds weights; None without autocast."""
        device = self.policy.lm.device.type
        with self.precision():
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy whose weights have not been read, and the device of the run.

    Args:
        model: on the meta device.
        on_gpu: whether a GPU or the processor runs it.
        computes_in: dtype in which the trainer scores and trains it.
        window: the most tokens of a prompt with its reply.
        trained_meanwhile: it is trained while replies are sampled.
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
        resident: bytes that are allocated during updates too.
        sampling: bytes that are released before an update.
        share: of the memory of a GPU, whatever its size, on top of both.
        released: whether the share is released before an update.
    """

    resident: int = 0
    sampling: int = 0
    share: float = 0.0
    released: bool = False


class Engine(ABC):
    """A sampler of replies for many environments at a time."""

    own_weights: ClassVar[bool] = False  # samples from a copy if ``PolicyHandle.trained_meanwhile`` is set
    sends_layers: ClassVar[bool] = False  # it takes a sharded policy layer by layer; False: it gathers all of it
    dtype: str = "auto"  # in which it computes; auto: that of the trainer

    @property
    def holds_copy(self) -> bool:
        """Whether it has separate weights, which each update must be sent to."""
        return True

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Check that what the engine needs is there, before any weights are read.

        Raises:
            ImportError: a package is missing.
        """

    def memory(self, policy: PlannedPolicy, concurrency: int) -> EngineMemory:
        """Return the memory, besides the policy, to sample ``concurrency`` replies at once; for plans of runs."""
        return EngineMemory()

    @abstractmethod
    def start(self, handle: PolicyHandle) -> None:
        """Start, once the strategy is set up and the policy is on its device; possible again after :meth:`stop`."""

    @abstractmethod
    def sync(self, policy_version: int) -> None:
        """Load the policy's current weights. Called before each collection and validation; no request is in flight."""

    def collecting(self) -> AbstractContextManager:
        """Return a context for all sampling that the trainer waits for; all ranks enter and leave it together.

        It is not used around a collection that continues while the policy is trained.
        """
        return nullcontext()

    def seats(self, players: int) -> AbstractContextManager[Sequence[AbstractContextManager]]:
        """Return a context for a collection by so many players, which gives each player a separate context.

        A player enters its context before its first request and leaves it after its last one. So an engine whose
        batches must not depend on time knows which players to wait for. Other engines do not need this method.
        """
        return nullcontext([nullcontext()] * players)

    @abstractmethod
    async def generate(self, request: SamplingRequest) -> Reply:
        """Sample one reply. An error ends the collection.

        Raises:
            EngineGoneError: nothing is left that could sample; the run saves and ends.
        """

    @abstractmethod
    def stop(self) -> None:
        """Release threads and memory; a no-op if not started."""


@dataclass(eq=False)
class Waiting:
    """A request of a caller on an event loop, whose reply is sampled in another thread."""

    request: SamplingRequest
    future: asyncio.Future[Reply]  # of the caller's event loop

    def tell(self, outcome: Reply | Exception) -> None:
        """Wake the caller, from any thread."""
        tell_all([(self, outcome)])


def tell_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    """Wake callers in their order, with one call for those of a loop. Works from any thread."""
    for loop, of_loop in groupby(outcomes, key=lambda one: one[0].future.get_loop()):
        with suppress(RuntimeError):  # the callers' loop is closed: nobody waits, and the worker must go on
            loop.call_soon_threadsafe(_settle_all, list(of_loop))


def _settle_all(outcomes: Sequence[tuple[Waiting, Reply | Exception]]) -> None:
    for waiting, outcome in outcomes:
        if waiting.future.done():  # cancelled, or told that the engine has ended
            continue
        if isinstance(outcome, StopIteration):  # which no future takes
            outcome = RuntimeError(f"StopIteration: {outcome}")
        if isinstance(outcome, Exception):
            waiting.future.set_exception(outcome)
            waiting.future.exception()  # counts as read: one whose caller is ended by another's error says nothing more
        else:
            waiting.future.set_result(outcome)
