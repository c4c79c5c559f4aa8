"""Comparison of an engine with the policy: log-probs of both for tokens that the engine samples.

An engine stores weights in packed, split or quantized copies, so tensors cannot be compared. Instead, every trained
weight is changed a lot and sent by the engine's own weight transfer. The log-probs of several hundred tokens that the
engine then samples are compared with those of the trainer with the same changed weights. This comparison detects
weights that the transfer misses, even if these were correct before. Then the original weights are restored bit for bit,
sent and compared again.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.scoring import Reader, row_scores
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.weights import moved
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.metrics.mismatch import Bounds, Comparison, bounds_for
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.types import ModelInput, Row

LEAST_TOKENS = 512  # smallest number of sampled tokens in a round, over all ranks
REPLIES, TOKENS = 8, 32  # number of replies in a batch, and largest number of tokens in a reply
MOST_BATCHES = 64  # largest number of batches in a round, needed if replies are short
FEW_TOKENS = 8  # largest number of tokens in a reply, for the check between two rollouts
VARIED, FRESH = 8, 24  # number of random ids at the end of a prompt of the run, and in a prompt without a common prefix
SEED = 90210  # separates these seeds from those of the run


@dataclass(frozen=True)
class Sampled:
    """A request and its reply; ``fresh`` means that the prompt shares no prefix with earlier prompts."""

    request: SamplingRequest
    reply: Reply
    fresh: bool

    @property
    def row(self) -> Row:
        """The prompt with the reply; its logit positions precede the sampled tokens."""
        prompt, ids = self.request.prompt, self.reply.ids
        return Row(prompt + ModelInput.of_ids(ids), tuple(range(len(prompt) - 1, len(prompt) - 1 + len(ids))))


@dataclass(frozen=True)
class Round:
    """Samples of an engine with one version of the weights."""

    number: int
    moves: bool  # whether the weights were changed
    samples: list[Sampled]  # samples of this rank
    seen: Comparison  # comparison over all ranks


@dataclass
class EngineComparison:
    """Compare an engine with the policy, without using the run's random states.

    All ranks must call each method together.

    Args:
        engine: engine that was started.
        handle: policy that the engine samples from, as the trainer hands it to the engine.
        prompts: at least one prompt of the run.
        tokenizer: tokenizer of the policy.
        reader: settings of forward passes, as in training.
        evaluating: function that returns a context with the trainer's precision and without gradients.
        seed: seed of prompts and replies, different for each rank.
        stopping: handler of requests to stop the run, also checked while replies are awaited.
        widens: whether to widen the bounds for a policy whose own rounding error is large.
    """

    engine: Engine
    handle: PolicyHandle
    prompts: Sequence[ModelInput]
    tokenizer: PreTrainedTokenizerBase
    reader: Reader
    evaluating: Callable[[], AbstractContextManager]
    seed: int
    stopping: Stopping
    widens: bool = True
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = bounds_for(self.engine.dtype, str(self.handle.computes_in))

    def rounds(self, count: int, version: int) -> Iterator[Round]:
        """Compare after each of several weight transfers; the last transfer sends the policy's unchanged weights.

        Args:
            count: number of rounds; 1: the unchanged weights only.
            version: version of the policy.
        """
        for number in range(count):
            moves = number + 1 < count
            with moved(self.handle.policy, number) if moves else nullcontext():
                self.engine.sync(version)
                samples = self._sample_round(number)
                seen = self.compare([each.row for each in samples], logps_of(samples))
            yield Round(number, moves, samples, seen)
        self.engine.sync(version)  # the transfer clears the prefix cache of these prompts

    def few(self) -> Comparison:
        """Compare 8 short replies to the same random prompts at each call.

        The prompts share no prefix with other prompts, so the engine's prefix cache still serves the run's prompts as
        before, and the next rollout is the same to the bit.
        """
        samples = self._ask(self._fresh(0, 0, FEW_TOKENS), fresh=True)
        return self.compare([each.row for each in samples], logps_of(samples))

    def compare(self, rows: Sequence[Row], logps: Tensor) -> Comparison:
        """Compare the engine's log-probs [N] at the logit positions of rows with the trainer's, over all ranks."""
        own, entropy = self.read(rows)
        of_ranks = zip(*all_gather((logps, own, entropy)), strict=True)
        engine, trainer, entropies = (torch.cat(parts) for parts in of_ranks)
        seen = Comparison(engine, trainer, entropies, self.bounds)
        if seen.fits or not self.widens:
            return seen
        other = self._read_in_other_precision(rows)
        return seen if other is None else replace(seen, rounding=torch.cat(all_gather((other - own).abs())))

    def read(self, rows: Sequence[Row], policy: LanguageModel | None = None) -> tuple[Tensor, Tensor]:
        """Return the trainer's log-probs and entropies [N] at the logit positions of the rows."""
        with self.evaluating():
            scores = row_scores(policy or self.handle.policy, rows, self.reader)
        logps, entropy = (torch.cat([row[i] for row in scores] or [torch.zeros(0)]).double() for i in (0, 1))
        return logps, entropy

    def _read_in_other_precision(self, rows: Sequence[Row]) -> Tensor | None:
        """Compute the trainer's log-probs in another precision, to measure the policy's own rounding error.

        For a trainer in 16 bits, the other precision is float32; for a trainer in float32, it is the engine's 16-bit
        dtype. If both use float32 on a GPU, TF32 is switched on or off, since vLLM's attention may multiply in TF32.

        Returns:
            Log-probs [N]; None if both sides use the same precision, and for sharded weights in 16 bits.
        """
        policy, device = self.handle.policy, self.reader.device.type
        weights = list(policy.parameters())
        precision: AbstractContextManager
        if any(weight.dtype.itemsize < 4 for weight in weights):
            if any(isinstance(weight, DTensor) for weight in weights):
                return None
            policy, precision = copy.deepcopy(policy).float(), torch.autocast(device, enabled=False)
        elif any(weight.dtype != torch.float32 for weight in weights):
            return None
        elif self.handle.computes_in.itemsize < 4:
            precision = torch.autocast(device, enabled=False)
        elif "16" in self.engine.dtype:
            dtype = torch.bfloat16 if "bfloat16" in self.engine.dtype else torch.float16
            precision = torch.autocast(device, dtype)
        elif device == "cuda":
            precision = other_float32_products()
        else:
            return None
        with self.evaluating(), precision:
            scores = row_scores(policy.eval(), rows, self.reader)
        return torch.cat([logps for logps, _ in scores] or [torch.zeros(0)]).double()

    def _sample_round(self, number: int) -> list[Sampled]:
        """Sample until all ranks together have enough tokens.

        Prompts with common prefixes come last in one round and first in the next, so that outdated entries of a prefix
        cache are detected.
        """
        samples: list[Sampled] = []
        with self.engine.collecting():
            for batch in range(MOST_BATCHES):
                alike, fresh = (self._alike(batch), False), (self._fresh(number, batch, TOKENS), True)
                for requests, is_fresh in (alike, fresh) if number % 2 else (fresh, alike):
                    samples += self._ask(requests, is_fresh)
                if sum(all_gather(sum(len(each.reply.ids) for each in samples))) >= LEAST_TOKENS:
                    break
        return samples

    def _ask(self, requests: Sequence[SamplingRequest], fresh: bool) -> list[Sampled]:
        async def replies() -> list[Reply]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        loop = LoopThread()
        try:
            with self.stopping.apart():
                found = loop.run(replies(), self.stopping.look)
        finally:
            loop.stop()
        return [Sampled(request, reply, fresh) for request, reply in zip(requests, found, strict=True)]

    def _alike(self, batch: int) -> list[SamplingRequest]:
        """Return requests that are the same in each round: prompts of the run with random ids at the end."""
        window = self.handle.window
        tokens, varied = min(TOKENS, window // 2), min(VARIED, window // 4)
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            random = Random(derive_seed(SEED, self.seed, k))
            start = self.prompts[k % len(self.prompts)].head(window - tokens - varied)
            ids = random.choices(self._plain_ids, k=varied)
            requests.append(self._request(start + ModelInput.of_ids(ids), tokens, k))
        return requests

    def _fresh(self, number: int, batch: int, tokens: int) -> list[SamplingRequest]:
        """Return requests with prompts of random ids that differ between rounds."""
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            random = Random(derive_seed(SEED, self.seed, number, k))
            ids = random.choices(self._plain_ids, k=min(FRESH, self.handle.window // 2))
            requests.append(self._request(ModelInput.of_ids(ids), min(tokens, self.handle.window - len(ids)), k))
        return requests

    def _request(self, prompt: ModelInput, tokens: int, k: int) -> SamplingRequest:
        return SamplingRequest(prompt, tokens, self.reader.temperature, derive_seed(SEED, self.seed, k, 1))

    @cached_property
    def _plain_ids(self) -> list[int]:
        """All token ids except those of special and added tokens."""
        added = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        size = min(len(self.tokenizer), int(self.handle.policy.lm.config.get_text_config().vocab_size))
        return [token for token in range(size) if token not in added]


def logps_of(samples: Sequence[Sampled]) -> Tensor:
    """Return the engine's log-probs [N] (nats, float64) of all sampled tokens, one reply after the other."""
    return torch.tensor([logp for each in samples for logp in each.reply.logps], dtype=torch.float64)


@contextmanager
def other_float32_products() -> Iterator[None]:
    """Switch TF32 for float32 products on if it is off, and off if it is on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
