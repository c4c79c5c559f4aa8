"""What an engine is asked in its proof: prompts of the run that end differently, and prompts of random ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.types import ModelInput, Row

LEAST_TOKENS = 512  # of a round, over all ranks
REPLIES, TOKENS = 8, 32  # of a batch, and of a reply
MOST_BATCHES = 64  # of a round, where replies are short
PROBED_TOKENS = 8  # of a reply, between two rollouts
VARIED, FRESH = 8, 24  # ids that make prompts different, and ids of prompts that have nothing in common
SEED = 90210  # sets the seeds of a proof apart from those of the run


@dataclass(frozen=True)
class Sampled:
    """Requests of this rank, and their replies."""

    requests: tuple[SamplingRequest, ...] = ()
    replies: tuple[Reply, ...] = ()
    fresh: tuple[bool, ...] = ()  # of each prompt: it has no beginning in common with any that was read before

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.requests + other.requests, self.replies + other.replies, self.fresh + other.fresh)

    @property
    def tokens(self) -> int:
        return sum(len(reply.ids) for reply in self.replies)

    @property
    def rows(self) -> list[Row]:
        """Prompts with their replies, read before each sampled token."""
        return [
            Row(
                request.prompt + ModelInput.of_ids(reply.ids),
                tuple(range(len(request.prompt) - 1, len(request.prompt) - 1 + len(reply.ids))),
            )
            for request, reply in zip(self.requests, self.replies, strict=True)
        ]

    @property
    def logps(self) -> Tensor:
        """Log-probs [N] (nats, float64) that the engine gave for all tokens, one reply after the other."""
        return torch.tensor([logp for reply in self.replies for logp in reply.logps], dtype=torch.float64)

    @property
    def fresh_tokens(self) -> Tensor:
        """Whether each of these tokens [N] follows a fresh prompt."""
        return torch.tensor([fresh for fresh, r in zip(self.fresh, self.replies, strict=True) for _ in r.ids])

    def first(self, tokens: int) -> Sampled:
        """Return the first replies, as many as it takes to have so many tokens."""
        count = so_far = 0
        while count < len(self.replies) and so_far < tokens:
            so_far += len(self.replies[count].ids)
            count += 1
        return Sampled(self.requests[:count], self.replies[:count], self.fresh[:count])


class Questions:
    """Requests to an engine, which take nothing from the random streams of the run.

    Args:
        engine: started.
        handle: of the policy that it samples from.
        prompts: of the run, at least one.
        tokenizer: of the policy.
        temperature: of sampling.
        seed: of the run; each rank has its own.
        stopping: of the run, which may leave while replies are waited for.
    """

    def __init__(
        self,
        engine: Engine,
        handle: PolicyHandle,
        prompts: Sequence[ModelInput],
        tokenizer: PreTrainedTokenizerBase,
        temperature: float,
        seed: int,
        stopping: Stopping,
    ) -> None:
        self.engine, self.handle, self.prompts, self.tokenizer = engine, handle, prompts, tokenizer
        self.temperature, self.seed, self.stopping = temperature, seed, stopping

    def ask_round(self, number: int) -> Sampled:
        """Ask until all ranks together have enough tokens; every rank must call it.

        Prompts that begin alike are asked last in one round and first in the next, so that kept ones are met.
        """
        sampled = Sampled()
        with self.engine.collecting():
            for batch in range(MOST_BATCHES):
                alike, fresh = (self._alike(batch), False), (self._fresh(number, batch, TOKENS), True)
                for requests, is_fresh in (alike, fresh) if number % 2 else (fresh, alike):
                    sampled += self._ask(requests, is_fresh)
                if sum(all_gather(sampled.tokens)) >= LEAST_TOKENS:
                    break
        return sampled

    def ask_few(self) -> Sampled:
        """Ask for a few short replies to fresh prompts, the same ones each time."""
        return self._ask(self._fresh(0, 0, PROBED_TOKENS), fresh=True)

    def _ask(self, requests: Sequence[SamplingRequest], fresh: bool) -> Sampled:
        loop = LoopThread()
        try:
            with self.stopping.apart():
                replies = loop.run(_replies(self.engine, requests), self.stopping.look)
        finally:
            loop.stop()
        return Sampled(tuple(requests), tuple(replies), (fresh,) * len(requests))

    def _alike(self, batch: int) -> list[SamplingRequest]:
        """Return requests that are the same in each round, with prompts of the run that end differently."""
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            window = self.handle.window
            tokens, varied = min(TOKENS, window // 2), min(VARIED, window // 4)
            random = Random(derive_seed(SEED, self.seed, k))
            start = self.prompts[k % len(self.prompts)].head(window - tokens - varied)
            prompt = start + ModelInput.of_ids(random.choices(self._plain_ids, k=varied))
            requests.append(self._request(prompt, tokens, k))
        return requests

    def _fresh(self, number: int, batch: int, tokens: int) -> list[SamplingRequest]:
        """Return requests with prompts of random ids, other ones for each number."""
        requests = []
        for k in range(batch * REPLIES, (batch + 1) * REPLIES):
            random = Random(derive_seed(SEED, self.seed, number, k))
            prompt = random.choices(self._plain_ids, k=min(FRESH, self.handle.window // 2))
            cap = min(tokens, self.handle.window - len(prompt))
            requests.append(self._request(ModelInput.of_ids(prompt), cap, k))
        return requests

    def _request(self, prompt: ModelInput, tokens: int, k: int) -> SamplingRequest:
        seed = derive_seed(SEED, self.seed, k, 1)
        return SamplingRequest(prompt, tokens, self.temperature, seed)

    @cached_property
    def _plain_ids(self) -> list[int]:
        """All ids but special and added ones."""
        added = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        size = min(len(self.tokenizer), int(self.handle.policy.lm.config.get_text_config().vocab_size))
        return [token for token in range(size) if token not in added]


async def _replies(engine: Engine, requests: Sequence[SamplingRequest]) -> list[Reply]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
