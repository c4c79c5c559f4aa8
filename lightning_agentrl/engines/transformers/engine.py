"""Sampling with transformers in the trainer's process: for small models, on any device, without further packages.

A worker thread samples one batch of replies; requests join the batch while finished replies leave. A prefix that
prompts share is computed once when the prompts join together. On a CPU the prefix of all running prompts is cached
until the weights change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar

import torch

from lightning_agentrl.engines.base import (
    Engine,
    EngineMemory,
    PlannedPolicy,
    PolicyHandle,
    Reply,
    SamplingRequest,
    Waiting,
    tell_all,
)
from lightning_agentrl.engines.transformers.admission import Admission, Draft, Rule
from lightning_agentrl.engines.transformers.batch import Batch
from lightning_agentrl.engines.weights import copied_bytes, copy_weights, frozen_copy
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.types.model_input import check_text_only


class TransformersEngine(Engine):
    """Engine that samples with the policy itself; nothing is copied, so new weights are available at once.

    If the policy is trained during sampling (``max_staleness`` of the data module), the engine samples with a copy.

    Args:
        max_batch: largest number of replies that are sampled at a time.
        admission: rule by which requests join the batch. With ``by_number``, requests join when every environment of
            the rollout has a pending request, so equal runs are equal to the bit. With ``as_they_come``, requests join
            in order of arrival, so batches depend on timing.
        admit_every: number of sampling steps between two admissions ``by_number``. Sampling waits for environments
            only at an admission. With 1, sampling waits for every environment step; larger values suit slow
            environments.
        absence_seconds: seconds after which sampling stops waiting for an environment without a pending request. The
            batches then depend on timing, and the environment's next turn has ``late`` among its ``env_errors``.
    """

    own_weights: ClassVar[bool] = True
    gather_seconds = 0.005  # time that the first request waits for other requests, with ``as_they_come``

    def __init__(
        self,
        max_batch: int = 64,
        admission: Rule = "by_number",
        admit_every: int = 1,
        absence_seconds: float = 60.0,
    ) -> None:
        if min(max_batch, admit_every) < 1:
            raise ValueError(f"max_batch and admit_every must be at least 1, got {max_batch} and {admit_every}")
        self.max_batch = max_batch
        self.admission = admission
        self.admit_every = admit_every
        self.absence_seconds = absence_seconds
        self.policy_version = 0
        self._trained: LanguageModel | None = None  # the trained policy, if the sampling policy is a copy
        self._desk: Admission | None = None  # set while the engine is started, like `_batch` and `_worker`
        self._batch: Batch | None = None
        self._worker: threading.Thread | None = None

    @property
    def holds_copy(self) -> bool:
        return self._trained is not None

    def memory(self, policy: PlannedPolicy, concurrency: int) -> EngineMemory:
        """Estimate keys and values of one batch and of cached conversations, and the copy of the policy, if any."""
        lm = policy.model.lm
        config = lm.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * head_dim * lm.dtype.itemsize
        batch = 2 * min(concurrency, self.max_batch) * policy.window * per_token
        if not policy.trained_meanwhile:
            return EngineMemory(sampling=batch)
        rounds_to = None if policy.computes_in == lm.dtype else policy.computes_in
        return EngineMemory(resident=batch + copied_bytes(policy.model, rounds_to))

    def start(self, handle: PolicyHandle) -> None:
        self._trained = handle.policy if handle.trained_meanwhile else None
        if self._trained is not None:
            handle = replace(handle, policy=frozen_copy(self._trained, handle.rounds_to))
        self._batch = Batch(handle, self.max_batch * handle.window)
        if self._worker is None:
            self._desk = Admission(self.admission, self.admit_every, self.absence_seconds, self.gather_seconds)
            self._worker = threading.Thread(target=self._serve, name="transformers-engine", daemon=True)
            self._worker.start()

    def sync(self, policy_version: int) -> None:
        self.policy_version = policy_version
        if self._trained is None:
            torch.clear_autocast_cache()  # the cache holds casts of the old weights
        elif self._batch is not None:
            copy_weights(self._trained, to=self._batch.policy)
        if self._batch is not None:
            # Also forget if the weights are the same, so that a resumed run equals an uninterrupted run.
            self._batch.forget()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Gather all weights of the policy on this rank, since ranks sample different numbers of batches."""
        with self._started()[1].handle.gathered():
            try:
                yield
            finally:
                torch.clear_autocast_cache()  # the cache holds casts without gradients of weights that are trained next

    def seats(self, players: int) -> AbstractContextManager[Sequence[AbstractContextManager]]:
        if self.admission == "as_they_come":
            return super().seats(players)
        return self._started()[0].seats(players)

    def stop(self) -> None:
        if self._desk is not None and self._worker is not None:
            rest = self._desk.close()
            self._worker.join()
            for draft in rest:  # the worker has ended and cannot answer these requests
                draft.tell(RuntimeError("the engine was stopped"))
        self._desk = self._worker = self._batch = self._trained = None

    async def generate(self, request: SamplingRequest) -> Reply:
        desk, batch = self._started()
        if batch.policy.image_reader is None:
            check_text_only([request.prompt], "TransformersEngine")
        else:
            for image in request.prompt.images:
                batch.policy.image_reader.grid(image)  # raises an error if the policy cannot read the image
        draft = desk.ask(request, asyncio.get_running_loop().create_future())
        try:
            return await draft.future
        except asyncio.CancelledError:
            desk.settle([draft])
            raise

    def _started(self) -> tuple[Admission, Batch]:
        if self._desk is None or self._batch is None:
            raise RuntimeError("the engine was not started")
        return self._desk, self._batch

    @torch.no_grad()
    def _serve(self) -> None:
        """Run the worker thread: sample batch after batch until the queue is closed."""
        desk, batch = self._started()
        try:
            if (device := batch.policy.lm.device).type == "cuda":
                torch.cuda.set_device(device)  # the default device of a new thread is the first GPU
            first = desk.next(self.max_batch, running=False)
            while first is not None:
                batch = self._started()[1]
                # Leaving autocast clears the cache of cast weights for all threads: casts for the previous batch, and
                # also casts of weights that are being trained.
                with batch.handle.precision():
                    while first is not None and batch is self._batch:  # a restarted engine has another batch
                        self._sample(desk, batch, first)
                        first = desk.next(self.max_batch, running=False)
        except BaseException as error:  # for example a warning that is raised as an error
            for draft in desk.close():  # later requests are refused
                draft.tell(RuntimeError(_ended_by(error)))
            raise

    def _sample(self, desk: Admission, batch: Batch, new: Sequence[Draft]) -> None:
        """Sample until no reply is left. An error is passed to all waiting callers."""
        try:
            with _evaluating(batch.policy):
                done = batch.step(new)
                while batch.drafts:
                    self._answer(desk, batch, done)
                    room = self.max_batch - len(batch.drafts)
                    done = batch.step((desk.next(room, running=True) if batch.prefill.whole_rows else None) or ())
            self._answer(desk, batch, done)  # answer after the policy is back in its previous mode
        except BaseException as error:
            fault = error if isinstance(error, Exception) else RuntimeError(_ended_by(error))
            for draft in batch.drop():
                if not draft.settled:
                    desk.settle([draft])
                    draft.tell(fault)
            if fault is not error:
                raise

    def _answer(self, desk: Admission, batch: Batch, done: Sequence[Draft]) -> None:
        outcomes: list[tuple[Waiting, Reply | Exception]] = []
        for draft in done:
            closed = draft.ids[-1] in batch.handle.stop_token_ids
            reply = Reply(tuple(draft.ids), tuple(draft.logps), closed, self.policy_version, draft.late)
            outcomes.append((draft, reply))
        desk.settle(done)  # settle before the callers wake, since callers send their next requests at once
        tell_all(outcomes)


def _ended_by(error: BaseException) -> str:
    return f"sampling has ended: {type(error).__name__}: {error}"


@contextmanager
def _evaluating(policy: LanguageModel) -> Iterator[None]:
    """Put the policy into eval mode inside the context."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)
