"""An engine that can be understood at a glance, with a copy of the weights, and all ways to get it wrong."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.weights import named_weights

Logits = Callable[[Tensor, Sequence[int]], Tensor]  # of the next token [V], after temperature; and all ids before it


def as_is(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    return logits_V


class PlainEngine(Engine):
    """Samples with a copy of the policy, at a temperature above 0.

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
        self.claimed_from: Logits | None = None  # None: what is sampled from
        self.other_head: Tensor | None = None  # a copy of the head that no update reaches
        self.updates = 0
        self._waiting: list[tuple[SamplingRequest, asyncio.Future[Reply]]] = []

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

    async def generate(self, request: SamplingRequest) -> Reply:
        loop = asyncio.get_running_loop()
        self._waiting.append((request, loop.create_future()))
        reply = self._waiting[-1][1]
        if len(self._waiting) == 1:
            loop.call_soon(self._serve)  # behind all that is about to ask
        return await reply

    @torch.no_grad()
    def _serve(self) -> None:
        """All rows are read anew for each token: no cache, nothing to go wrong."""
        waiting, self._waiting = self._waiting, []
        asked = [request for request, _ in waiting]
        random = [torch.Generator().manual_seed(request.seed) for request in asked]
        rows, logps = [list(request.prompt.ids) for request in asked], [list[float]() for _ in asked]
        ends = set(self.handle.stop_token_ids)
        while going := [
            i
            for i, request in enumerate(asked)
            if len(logps[i]) < request.max_tokens and not (logps[i] and rows[i][-1] in ends)
        ]:
            for i, logits in zip(going, self._logits([rows[i] for i in going]), strict=True):
                log_pi = (logits.double() / asked[i].temperature).log_softmax(-1)
                drawn = self.sampled_from(log_pi, rows[i]).log_softmax(-1)
                token = int(torch.multinomial(drawn.exp(), 1, generator=random[i]))
                claimed = drawn if self.claimed_from is None else self.claimed_from(log_pi, rows[i]).log_softmax(-1)
                logps[i].append(float(claimed[token]))
                rows[i].append(token)
        for i, (request, reply) in enumerate(waiting):
            ids = tuple(rows[i][len(request.prompt) :])
            reply.set_result(Reply(ids, tuple(logps[i]), ids[-1] in ends, self.version))

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Of the token that follows each row, [B, V]."""
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        trunk, head = cast(Any, self.lm.base_model), cast(Any, self.lm.get_output_embeddings())
        with self.handle.precision():
            hidden = trunk(input_ids=ids, attention_mask=seen, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
            return head(last) if self.other_head is None else nn.functional.linear(last, self.other_head)

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
