"""Replies that are sampled at the same time: others join between two tokens, and those that are done leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lightning_agentrl.engines.base import SamplingRequest
from lightning_agentrl.engines.transformers.admission import Asked
from lightning_agentrl.engines.transformers.prefill import PaddedPrefill, TreePrefill
from lightning_agentrl.engines.transformers.rows import Rows


class Draft:
    """A reply while it is sampled, with a random stream of its own, so that batching cannot change it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.random = torch.Generator().manual_seed(self.request.seed)
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.done = False

    @property
    def request(self) -> SamplingRequest:
        return self.asked.waiting.request

    @property
    def over(self) -> bool:
        """Whether no more tokens are needed: it is done, or nobody waits for it."""
        return self.done or self.asked.settled

    def sample(self, logits_V: Tensor) -> None:
        """Add a token."""
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


class Batch:
    """The replies that are being sampled, one row each.

    Args:
        prefill: reads their prompts, with the policy that samples.
        stop_token_ids: end a reply.
    """

    def __init__(self, prefill: TreePrefill | PaddedPrefill, stop_token_ids: Collection[int]) -> None:
        self.drafts: list[Draft] = []
        self._prefill = prefill
        self.stop_token_ids = stop_token_ids
        self._rows: Rows | None = None  # one for each draft

    @property
    def takes_more(self) -> bool:
        """Whether replies may join those that are sampled."""
        return self._prefill.whole_rows

    def step(self, new: Sequence[Asked]) -> list[Draft]:
        """Sample the first token of new replies, or where there are none the next one of all; return what is done."""
        if new:
            beside = [draft.request.prompt for draft in self.drafts]
            sampled = [Draft(asked) for asked in new]
            self.drafts = [*self.drafts, *sampled]
            hidden, rows = self._prefill([draft.request.prompt for draft in sampled], beside)
            if self._rows is None:
                self._rows = rows
            else:
                self._rows.join(rows)
        else:
            assert self._rows is not None
            sampled = self.drafts
            hidden = self._rows.read_on(self._prefill.policy, [0 if draft.over else draft.ids[-1] for draft in sampled])
        logits = cast(nn.Module, self._prefill.policy.lm.get_output_embeddings())(hidden)
        done = [draft for i, draft in enumerate(sampled) if not draft.over and self._ends(draft, logits[i])]
        self._let_go()
        return done

    def _let_go(self) -> None:
        """Drop the rows of replies that are over."""
        left = [i for i, draft in enumerate(self.drafts) if not draft.over]
        if not left:
            self.drafts, self._rows = [], None
        elif self._prefill.whole_rows and len(left) < len(self.drafts):
            cast(Rows, self._rows).keep(left)
            self.drafts = [self.drafts[i] for i in left]

    def _ends(self, draft: Draft, logits_V: Tensor) -> bool:
        """Add a token to a reply; return whether it was the last."""
        draft.sample(logits_V)
        draft.done = draft.ids[-1] in self.stop_token_ids or len(draft.ids) >= draft.request.max_tokens
        return draft.done
