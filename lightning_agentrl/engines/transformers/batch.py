"""Replies that are sampled at the same time: others join between two tokens, and those that are done leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lightning_agentrl.engines.base import SamplingRequest
from lightning_agentrl.engines.transformers.admission import Asked
from lightning_agentrl.engines.transformers.prefill import PaddedPrefill, RowsOf, TreePrefill
from lightning_agentrl.engines.transformers.rows import Rows

SAMPLED_AT_ONCE = 2**20  # probabilities, which bounds the memory of sampling
SAMPLED_AT_ONCE_BY_A_GPU = 2**23  # which is waited for after each part
DRAWN_AT_ONCE = 16  # random numbers of a reply


class Draft:
    """A reply while it is sampled, with a random stream of its own, so that batching cannot change it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.random = torch.Generator().manual_seed(self.request.seed)
        self._drawn: list[float] = []  # numbers of its stream that are still to come, the next one last
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.done = False

    @property
    def request(self) -> SamplingRequest:
        return self.asked.waiting.request

    def draw(self) -> float:
        """Return the next number of its stream, from 0 to 1; 0 if it needs none."""
        if self.request.temperature == 0.0:
            return 0.0
        if not self._drawn:
            count = min(self.request.max_tokens - len(self.ids), DRAWN_AT_ONCE)
            self._drawn = torch.rand(count, generator=self.random, dtype=torch.float64).tolist()[::-1]
        return self._drawn.pop()

    @property
    def over(self) -> bool:
        """Whether no more tokens are needed: it is done, or nobody waits for it."""
        return self.done or self.asked.settled


def sample(drafts: Sequence[Draft], logits_BV: Tensor) -> None:
    """Add a token to each reply. Each draws from its own stream, so it does not matter who is sampled beside it."""
    most = SAMPLED_AT_ONCE_BY_A_GPU if logits_BV.is_cuda else SAMPLED_AT_ONCE
    at_once = max(most // max(logits_BV.shape[1], 1), 1)
    for begin in range(0, len(drafts), at_once):
        part, logits = drafts[begin : begin + at_once], logits_BV[begin : begin + at_once].double()
        temperatures = logits.new_tensor([draft.request.temperature for draft in part])[:, None]
        greedy = temperatures == 0.0
        log_pi = (logits / temperatures.masked_fill(greedy, 1.0)).log_softmax(-1)
        cumulative = _cumulative(log_pi.exp())
        shares = logits.new_tensor([draft.draw() for draft in part])[:, None]
        tokens = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True).clamp_max(logits.shape[1] - 1)
        tokens = torch.where(greedy, log_pi.argmax(-1, keepdim=True), tokens)
        for draft, token, logp in zip(
            part, tokens[:, 0].tolist(), log_pi.gather(1, tokens)[:, 0].tolist(), strict=True
        ):
            draft.ids.append(token)
            draft.logps.append(logp)


def _cumulative(shares_BV: Tensor) -> Tensor:
    """Return the sums up to each column; a GPU has no deterministic ones (``trainer.deterministic``)."""
    if shares_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return shares_BV.cpu().cumsum(-1).to(shares_BV.device)
    return shares_BV.cumsum(-1)


class Batch:
    """The replies that are being sampled, one row each.

    Args:
        prefill: reads their prompts, with the policy that samples.
        stop_token_ids: end a reply.
    """

    def __init__(self, prefill: TreePrefill | PaddedPrefill, stop_token_ids: Collection[int]) -> None:
        self.drafts: list[Draft] = []
        self.new: Sequence[Asked] = ()  # that the last step has begun, or failed to begin
        self.prefill = prefill
        self.stop_token_ids = stop_token_ids
        self._rows: Rows | None = None  # one for each draft

    def step(self, new: Sequence[Asked]) -> list[Draft]:
        """Sample the first token of new replies, or where there are none the next one of all; return what is done."""
        before, rows_of, self.new = self.drafts, None, new
        if new:
            sampled = [Draft(asked) for asked in new]
            self.drafts = [*before, *sampled]
            prompts = [draft.request.prompt for draft in sampled]
            hidden, rows_of = self.prefill(prompts, [draft.request.prompt for draft in before])
        else:
            assert self._rows is not None
            sampled = before
            hidden = self._rows.read_on(self.prefill.policy, [0 if draft.over else draft.ids[-1] for draft in sampled])
        logits = cast(nn.Module, self.prefill.policy.lm.get_output_embeddings())(hidden)
        goes_on = [i for i, draft in enumerate(sampled) if not draft.over]
        going = [sampled[i] for i in goes_on]
        sample(going, logits if len(going) == len(sampled) else logits[goes_on])
        for draft in going:
            draft.done = draft.ids[-1] in self.stop_token_ids or len(draft.ids) >= draft.request.max_tokens
        self.drafts = self._let_go(before)
        if rows_of is not None:
            self.drafts = [*self.drafts, *self._take_in(sampled, rows_of)]
        return [draft for draft in going if draft.done]

    def _let_go(self, drafts: list[Draft]) -> list[Draft]:
        """Drop the rows of replies that are over, and return those that are left."""
        left = [i for i, draft in enumerate(drafts) if not draft.over]
        if not left:
            self._rows = None
            return []
        if not self.prefill.whole_rows or len(left) == len(drafts):
            return drafts
        cast(Rows, self._rows).keep(left)
        return [drafts[i] for i in left]

    def _take_in(self, drafts: list[Draft], rows_of: RowsOf) -> list[Draft]:
        """Add the rows of new replies that go on behind their first token, and return these."""
        left = [i for i, draft in enumerate(drafts) if not draft.over]
        if not left:
            return []
        rows = rows_of(left)
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.join(rows)
        return [drafts[i] for i in left] if self.prefill.whole_rows else drafts
