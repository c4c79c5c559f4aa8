"""An engine that can be understood at a glance, with a copy of the weights, and all ways to get it wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.weights import named_weights

Logits = Callable[[Tensor, Sequence[int]], Tensor]  # of the next token [V], after temperature; and all ids before it


def as_is(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    return logits_V


class PlainEngine(Engine):
    """Samples one request at a time with a copy of the policy.

    Args:
        withheld: weights with one of these in their names are never taken over.
        aged: take over the weights of the update before.
        from_update: from which update on, counted from 0, something is withheld or aged.
        swap_experts: of a mixture, take the first expert for the second and the other way round.
        dtype: of the copy.
    """

    own_weights = True

    def __init__(
        self,
        withheld: Sequence[str] = (),
        aged: bool = False,
        from_update: int = 0,
        swap_experts: bool = False,
        dtype: str = "auto",
    ) -> None:
        self.withheld, self.aged, self.from_update, self.swap_experts = withheld, aged, from_update, swap_experts
        self.dtype = dtype
        self.sampled_from: Logits = as_is
        self.told: Logits | None = None  # None: what is sampled from
        self.other_head: Tensor | None = None  # a copy of the head that no update reaches
        self.updates = 0

    def start(self, handle: PolicyHandle) -> None:
        self.handle = handle
        if not hasattr(self, "lm"):
            self.lm = copy.deepcopy(handle.policy.lm).requires_grad_(False).eval()
            if self.dtype != "auto":
                self.lm.to(getattr(torch, self.dtype))
        self._queued = dict[str, Tensor]()

    @torch.no_grad()
    def sync(self, policy_version: int) -> None:
        self.version = policy_version
        sent = {name: weight.clone() for name, weight in named_weights(self.handle.policy.lm)}
        wrong, self.updates = self.updates >= self.from_update, self.updates + 1
        taken = self._queued or sent if wrong and self.aged else sent
        self._queued = sent
        for name, own in named_weights(self.lm):
            if wrong and any(part in name for part in self.withheld):
                continue
            new = taken[name]
            if self.swap_experts and "experts" in name and new.dim() == 3:
                new = new[[1, 0, *range(2, len(new))]]
            own.copy_(new)

    @torch.no_grad()
    async def generate(self, request: SamplingRequest) -> Reply:
        random = torch.Generator().manual_seed(request.seed)
        ids, logps, cache = list(request.prompt.ids), list[float](), DynamicCache(config=self.lm.config)
        unread, closed = list(ids), False
        while len(logps) < request.max_tokens and not closed:
            with self.handle.precision():
                hidden = self._trunk(torch.tensor([unread]), cache)
                head: Any = self.lm.get_output_embeddings()
                logits = head(hidden) if self.other_head is None else nn.functional.linear(hidden, self.other_head)
            log_pi = (logits.double() / (request.temperature or 1.0)).log_softmax(-1)
            drawn = self.sampled_from(log_pi, ids).log_softmax(-1)
            token = (
                int(torch.multinomial(drawn.exp(), 1, generator=random)) if request.temperature else int(drawn.argmax())
            )
            told = drawn if self.told is None else self.told(log_pi, ids).log_softmax(-1)
            logps.append(float(told[token]))
            ids.append(token)
            unread, closed = [token], token in self.handle.stop_token_ids
        return Reply(tuple(ids[len(request.prompt) :]), tuple(logps), closed, self.version)

    def _trunk(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        trunk: Any = self.lm.base_model
        mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.int64)
        return trunk(input_ids=ids, attention_mask=mask, past_key_values=cache).last_hidden_state[0, -1]

    def stop(self) -> None:
        pass


def colder(factor: float) -> Logits:
    return lambda logits, ids: logits / factor


def top_p(share: float) -> Logits:
    def cut(logits: Tensor, ids: Sequence[int]) -> Tensor:
        values, order = logits.softmax(-1).sort(descending=True)
        dropped = order[values.cumsum(-1) - values >= share]
        return logits.index_fill(0, dropped, -torch.inf)

    return cut


def top_k(k: int) -> Logits:
    return lambda logits, ids: logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


def presence_penalty(amount: float) -> Logits:
    return lambda logits, ids: logits.index_add(
        0, torch.tensor(sorted(set(ids))), torch.full((len(set(ids)),), -amount, dtype=logits.dtype)
    )
