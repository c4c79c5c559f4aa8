"""Sampling with transformers in the trainer's process: no further package, on any device, for small models.

A worker thread takes all waiting requests as one batch. Common prefixes of prompts are computed once per batch, and
the prefix common to all of them is kept until the weights change.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_agentrl.engines.base import Engine, EngineMemory, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.transformers.prefill import PaddedPrefill, TreePrefill, decode
from lightning_agentrl.engines.waiting import Waiting
from lightning_agentrl.engines.weights import copy_weights, frozen_copy
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.types.model_input import check_text_only


class TransformersEngine(Engine):
    """Engine that samples with the policy itself; nothing is copied, so new weights are available at once.

    If the policy is trained meanwhile (``max_staleness`` of the data module), it samples with a copy.

    Args:
        max_batch: largest number of requests in a batch.
        gather_seconds: seconds that a batch waits for another request before it starts.
    """

    own_weights: ClassVar[bool] = True

    def __init__(self, max_batch: int = 64, gather_seconds: float = 0.005) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.max_batch = max_batch
        self.gather_seconds = gather_seconds
        self.policy_version = 0
        self._handle: PolicyHandle | None = None  # holds the policy that samples
        self._trained: LanguageModel | None = None  # the original, if the sampling policy is a copy
        self._waiting: queue.Queue[Waiting | None] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._prefill: TreePrefill | PaddedPrefill | None = None

    @property
    def holds_copy(self) -> bool:
        return self._trained is not None

    def memory(self, handle: PolicyHandle, concurrency: int) -> EngineMemory:
        """Return the keys and values of one batch of replies, plus the policy's copy if it is trained meanwhile."""
        config = handle.policy.lm.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * head_dim * handle.policy.lm.dtype.itemsize
        batch = min(concurrency, self.max_batch) * handle.window * per_token
        if not handle.trained_meanwhile:
            return EngineMemory(sampling=batch)
        return EngineMemory(resident=batch + sum(p.nbytes for p in handle.policy.parameters() if p.requires_grad))

    def start(self, handle: PolicyHandle) -> None:
        self._trained = handle.policy if handle.trained_meanwhile else None
        if self._trained is not None:
            handle = replace(handle, policy=frozen_copy(self._trained))
        self._handle = handle
        self._prefill = (TreePrefill if handle.policy.shares_prefixes else PaddedPrefill)(handle.policy)
        if self._worker is None:
            self._worker = threading.Thread(target=self._serve, name="transformers-engine", daemon=True)
            self._worker.start()

    def sync(self, policy_version: int) -> None:
        self.policy_version = policy_version
        if self._trained is not None and self._handle is not None:
            copy_weights(self._trained, to=self._handle.policy)
        if self._prefill is not None:
            self._prefill.forget()  # computed with the old weights

    def collecting(self) -> AbstractContextManager:
        """Gather all weights of the policy on this rank, since ranks sample different numbers of batches."""
        if self._handle is None:
            raise RuntimeError("the engine was not started")
        return self._handle.gathered()

    def stop(self) -> None:
        if self._worker is not None:
            self._waiting.put(None)
            self._worker.join()
            self._worker = None
        while not self._waiting.empty():  # too late: nobody else would answer them
            if (late := self._waiting.get()) is not None:
                late.tell(RuntimeError("the engine was stopped"))
        self._prefill = None
        self._handle = self._trained = None

    async def generate(self, request: SamplingRequest) -> Reply:
        if self._worker is None:
            raise RuntimeError("the engine was not started")
        check_text_only([request.prompt], "TransformersEngine")
        waiting = Waiting.for_reply(request)
        self._waiting.put(waiting)
        return await waiting.future

    def _serve(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                replies = self._generate_batch([waiting.request for waiting in batch])
            except Exception as error:  # noqa: BLE001 - passed to every caller that waits for this batch
                for waiting in batch:
                    waiting.tell(error)
            else:
                for waiting, reply in zip(batch, replies, strict=True):
                    waiting.tell(reply)

    def _next_batch(self) -> list[Waiting] | None:
        first = self._waiting.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < self.max_batch:
            try:
                more = self._waiting.get(timeout=self.gather_seconds)
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            batch.append(more)
        return batch

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[SamplingRequest]) -> list[Reply]:
        handle = cast(PolicyHandle, self._handle)
        was_training = handle.policy.training
        handle.policy.eval()
        try:
            with handle.precision():
                return self._sample(handle, requests)
        finally:
            handle.policy.train(was_training)

    def _sample(self, handle: PolicyHandle, requests: Sequence[SamplingRequest]) -> list[Reply]:
        prefill = cast(TreePrefill | PaddedPrefill, self._prefill)
        prompts = prefill([request.prompt for request in requests])
        hidden = prompts.hidden
        samplers = [_TokenSampler(request) for request in requests]
        stop_token_ids = set(handle.stop_token_ids)
        done = [False] * len(requests)
        while True:
            logits = cast(nn.Module, handle.policy.lm.get_output_embeddings())(hidden)
            tokens = [0 if done[i] else sampler.sample(logits[i]) for i, sampler in enumerate(samplers)]
            for i, (token, sampler) in enumerate(zip(tokens, samplers, strict=True)):
                done[i] = done[i] or token in stop_token_ids or len(sampler.ids) >= sampler.request.max_tokens
            if all(done):
                break
            hidden = decode(handle.policy, prompts, tokens)
        return [
            Reply(tuple(s.ids), tuple(s.logps), closed=s.ids[-1] in stop_token_ids, policy_version=self.policy_version)
            for s in samplers
        ]


class _TokenSampler:
    """A token sampler with a random stream per request, so that batching cannot change a reply."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.random = torch.Generator().manual_seed(request.seed)
        self.ids: list[int] = []
        self.logps: list[float] = []

    def sample(self, logits_V: Tensor) -> int:
        greedy = self.request.temperature == 0.0
        logits = logits_V.double() if greedy else logits_V.double() / self.request.temperature
        log_pi = logits.log_softmax(-1)
        if greedy:
            token = int(log_pi.argmax())
        else:
            cumulative = log_pi.exp().cumsum(-1)
            threshold = torch.rand((), generator=self.random, dtype=torch.float64).item() * cumulative[-1].item()
            token = int(torch.searchsorted(cumulative, threshold, right=True).clamp_max(len(log_pi) - 1))
        self.ids.append(token)
        self.logps.append(float(log_pi[token]))
        return token
