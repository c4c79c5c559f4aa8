"""Comparison of an engine with the policy: sampled tokens, and the log-probs of both sides for them.

An engine keeps weights in packed, split or quantized copies, so there is no tensor to compare. Instead, every trained
weight is moved far away and sent by the engine's own update; some hundred tokens that the engine then samples are
compared with the log-probs of the trainer, moved alike. A weight that the update does not reach shows, even if it had
the right value before. Then the weights are restored bit for bit, sent and compared again.
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

LEAST_TOKENS = 512  # of a round, over all ranks
REPLIES, TOKENS = 8, 32  # of a batch, and of a reply
MOST_BATCHES = 64  # of a round, if replies are short
FEW_TOKENS = 8  # of a reply, between two rollouts
VARIED, FRESH = 8, 24  # random ids that end prompts of the run, and of prompts that share no beginning with any other
SEED = 90210  # separates these seeds from those of the run


@dataclass(frozen=True)
class Sampled:
    """A request and its reply; ``fresh`` if its prompt shares no beginning with any earlier one."""

    request: SamplingRequest
    reply: Reply
    fresh: bool

    @property
    def row(self) -> Row:
        """The prompt with the reply, read before each sampled token."""
        prompt, ids = self.request.prompt, self.reply.ids
        return Row(prompt + ModelInput.of_ids(ids), tuple(range(len(prompt) - 1, len(prompt) - 1 + len(ids))))


@dataclass(frozen=True)
class Round:
    """Samples of an engine from one version of the weights."""

    number: int
    moves: bool  # whether the weights were moved
    samples: list[Sampled]  # of this rank
    seen: Comparison  # of all ranks


@dataclass
class EngineComparison:
    """Compare an engine with the policy, without using the random streams of the run.

    All ranks must call each method together.

    Args:
        engine: started.
        handle: of the policy that it samples from.
        prompts: of the run, at least one.
        tokenizer: of the policy.
        reader: reads rows as training does.
        evaluating: context of the trainer's precision, without gradients.
        seed: different for each rank.
        stopping: of the run, which may stop while replies are awaited.
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
        """Compare after several updates, the last one with the policy's own weights, which the engine has in the end.

        Args:
            count: number of rounds; 1: the policy's own weights alone.
            version: of the policy.
        """
        for number in range(count):
            moves = number + 1 < count
            with moved(self.handle.policy, number) if moves else nullcontext():
                self.engine.sync(version)
                samples = self._sample_round(number)
                seen = self.compare([each.row for each in samples], logps_of(samples))
            yield Round(number, moves, samples, seen)
        self.engine.sync(version)  # drops the prefixes that were read here

    def few(self) -> Comparison:
        """Compare 8 short replies to fresh prompts, the same ones each time.

        Their prompts share no beginning with any other, so the engine's prefix cache keeps what it had, and the next
        rollout is the same to the bit.
        """
        samples = self._ask(self._fresh(0, 0, FEW_TOKENS), fresh=True)
        return self.compare([each.row for each in samples], logps_of(samples))

    def compare(self, rows: Sequence[Row], logps: Tensor) -> Comparison:
        """Compare the engine's log-probs [N] at the positions of rows with the trainer's, over all ranks."""
        own, entropy = self.read(rows)
        of_ranks = zip(*all_gather((logps, own, entropy)), strict=True)
        engine, trainer, entropies = (torch.cat(parts) for parts in of_ranks)
        seen = Comparison(engine, trainer, entropies, self.bounds)
        if seen.fits or not self.widens:
            return seen
        other = self._read_in_other_precision(rows)
        return seen if other is None else replace(seen, rounding=torch.cat(all_gather((other - own).abs())))

    def read(self, rows: Sequence[Row], policy: LanguageModel | None = None) -> tuple[Tensor, Tensor]:
        """Return the trainer's log-probs and entropies [N] at the positions of the rows."""
        with self.evaluating():
            scores = row_scores(policy or self.handle.policy, rows, self.reader)
        logps, entropy = (torch.cat([row[i] for row in scores] or [torch.zeros(0)]).double() for i in (0, 1))
        return logps, entropy

    def _read_in_other_precision(self, rows: Sequence[Row]) -> Tensor | None:
        """Read log-probs in another precision than the trainer's, to measure the policy's own rounding error.

        A trainer in 16 bits computes in float32, and one in float32 in the engine's 16 bits. If both compute in float32
        on a GPU, one of them may multiply in TF32, as vLLM's attention does.

        Returns:
            None if no other precision is involved, and for sharded weights in 16 bits.
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

        Prompts that begin alike come last in one round and first in the next, so that a prefix cache is used.
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
        """Return requests that are the same in each round, with prompts of the run that end differently."""
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
        """Return requests with prompts of random ids, different for each number."""
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
        """All ids but special and added ones."""
        added = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        size = min(len(self.tokenizer), int(self.handle.policy.lm.config.get_text_config().vocab_size))
        return [token for token in range(size) if token not in added]


def logps_of(samples: Sequence[Sampled]) -> Tensor:
    """Return the log-probs [N] (nats, float64) that the engine reported for all tokens, one reply after the other."""
    return torch.tensor([logp for each in samples for logp in each.reply.logps], dtype=torch.float64)


@contextmanager
def other_float32_products() -> Iterator[None]:
    """Multiply float32 in TF32, or no longer so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
