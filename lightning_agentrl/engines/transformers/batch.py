"""Continuous batching: requests join the batch between two tokens, and finished replies leave it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lightning_agentrl.engines.base import PolicyHandle, SamplingRequest
from lightning_agentrl.engines.transformers.admission import Draft
from lightning_agentrl.engines.transformers.rows import Conversation, PaddedPrefill, Rows, TreePrefill, read_on
from lightning_agentrl.models.language_model import vocabulary_logits
from lightning_agentrl.models.prefix_tree import common_prefix_length
from lightning_agentrl.types.model_input import ModelInput

LEAST_GAIN = 32  # least number of tokens that a cached conversation must save to be used
SAMPLED_AT_ONCE = 2**20  # probabilities computed at a time; this bounds the memory of sampling
SAMPLED_AT_ONCE_BY_A_GPU = 2**23  # larger than on a CPU, since each part ends with a synchronization


class Batch:
    """The replies that are being sampled, one row each, and the last conversation of each player.

    Keys and values of a conversation are cached until the weights change, so that only the new tokens of a prompt that
    continues the conversation are computed.

    Args:
        handle: sampling policy, as the trainer hands it to the engine.
        most_tokens: largest number of tokens in all cached conversations; the oldest conversations are dropped first.
    """

    def __init__(self, handle: PolicyHandle, most_tokens: int) -> None:
        self.handle, self.policy = handle, handle.policy
        self.most_tokens = most_tokens
        self.drafts: list[Draft] = []
        self.prefill = (TreePrefill if self.policy.engine_shares else PaddedPrefill)(self.policy)
        self._rows: Rows | None = None  # one row for each draft
        # Key: index of the environment, `request.number[0]`.
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()

    def forget(self) -> None:
        """Drop all cached keys and values, since the weights have changed."""
        self.prefill.forget()
        self._conversations.clear()

    def drop(self) -> list[Draft]:
        """Drop and return all drafts."""
        drafts, self.drafts, self._rows = self.drafts, [], None
        return drafts

    def step(self, new: Sequence[Draft]) -> list[Draft]:
        """Sample the first token of each new reply, or, without new replies, the next token of each running reply.

        Args:
            new: replies that join the batch.

        Returns:
            The replies that this token has finished.
        """
        sampled = new or self.drafts
        if new:
            before, self.drafts = self.drafts, [*self.drafts, *new]
            hidden, rows = self._read(new, [draft.request.prompt for draft in before])
            self._rows = rows if self._rows is None else self._rows.joined(rows)
        else:
            tokens = [0 if draft.over else draft.ids[-1] for draft in sampled]
            hidden = cast(Rows, self._rows).read_on(self.policy, tokens)
        logits = vocabulary_logits(self.policy.lm, hidden)
        places = [place for place, draft in enumerate(sampled) if not draft.over]
        going = [sampled[place] for place in places]
        sample(going, logits if len(going) == len(sampled) else logits[places])
        done = []
        for draft in going:
            request, ids = draft.request, draft.ids
            ended = ids[-1] in self.handle.stop_token_ids or len(ids) >= request.max_tokens
            draft.done = ended or (bool(request.stop) and any(text in self.handle.decode(ids) for text in request.stop))
            if draft.done:
                done.append(draft)
        self._let_go()
        return done

    def _let_go(self) -> None:
        """Drop finished and canceled replies, and drop their rows if the cache supports dropping rows."""
        left = [i for i, draft in enumerate(self.drafts) if not draft.over]
        if self.prefill.whole_rows and len(left) < len(self.drafts):
            for row, draft in enumerate(self.drafts):
                if draft.done and draft.request.number and len(draft.ids) > 1:
                    self._keep(draft, row)
            self._rows = cast(Rows, self._rows).kept(left) if left else None
            self.drafts = [self.drafts[i] for i in left]
        elif not left:
            self.drop()

    def _keep(self, draft: Draft, row: int) -> None:
        """Cache the conversation that ends with a reply, without the last token, whose keys were not computed."""
        player, keys = draft.request.number[0], (*draft.request.prompt.keys, *draft.ids[:-1])
        kept = self._conversations
        kept.pop(player, None)
        kept[player] = cast(Rows, self._rows).conversation(row, keys)
        while len(kept) > 1 and sum(len(one.keys) for one in kept.values()) > self.most_tokens:
            kept.popitem(last=False)

    def _read(self, new: Sequence[Draft], beside: Sequence[ModelInput]) -> tuple[Tensor, Rows]:
        """Prefill the prompts of new replies; skip the tokens of a prompt that are in a cached conversation.

        Args:
            new: replies to prefill.
            beside: prompts of the replies that are already running.

        Returns:
            Hidden states [B, H] of the last tokens of the prompts, and their rows.
        """
        prompts = [draft.request.prompt for draft in new]
        shared = common_prefix_length([prompt.keys for prompt in prompts]) if len(prompts) > 1 else 0
        found = [self._known(draft.request, shared) for draft in new]
        if not any(found):
            return self.prefill(prompts, beside)
        old = [i for i, one in enumerate(found) if one is not None]
        hidden, rows = read_on(self.policy, [prompts[i] for i in old], [one for one in found if one is not None])
        if fresh := [i for i, one in enumerate(found) if one is None]:
            fresh_hidden, fresh_rows = self.prefill([prompts[i] for i in fresh], beside)
            order = sorted(range(len(new)), key=[*fresh, *old].__getitem__)
            hidden, rows = torch.cat([fresh_hidden, hidden])[order], fresh_rows.joined(rows).kept(order)
        return hidden, rows

    def _known(self, request: SamplingRequest, shared: int) -> Conversation | None:
        """Return the cached conversation that a request continues, if longer than the common prefix.

        The new part of the prompt must not contain an image, since only text can be appended to cached rows.

        Args:
            request: request whose prompt is looked up.
            shared: length in tokens of the prefix that all new prompts share.
        """
        kept = self._conversations.get(request.number[0]) if request.number else None
        if kept is None or len(kept.keys) < shared + LEAST_GAIN:
            return None
        keys, known = request.prompt.keys, len(kept.keys)
        goes_on = len(keys) > known and keys[:known] == kept.keys and min(keys[known:]) >= 0
        return kept if goes_on else None


def sample(drafts: Sequence[Draft], logits_BV: Tensor) -> None:
    """Sample a token for each reply from its own random numbers, which do not depend on the other replies.

    Args:
        drafts: replies to extend.
        logits_BV: logits [B, V] of the next tokens, before temperature.
    """
    most = SAMPLED_AT_ONCE_BY_A_GPU if logits_BV.is_cuda else SAMPLED_AT_ONCE
    at_once = max(most // max(logits_BV.shape[1], 1), 1)
    for begin in range(0, len(drafts), at_once):
        part, logits = drafts[begin : begin + at_once], logits_BV[begin : begin + at_once].double()
        temperatures = logits.new_tensor([draft.request.temperature for draft in part])[:, None]
        greedy = temperatures == 0.0
        log_pi = (logits / temperatures.masked_fill(greedy, 1.0)).log_softmax(-1)
        pi = log_pi.exp()
        # CUDA has no deterministic cumulative sum (``trainer.deterministic``).
        summed = pi.cpu() if pi.is_cuda and torch.are_deterministic_algorithms_enabled() else pi
        cumulative = summed.cumsum(-1).to(pi.device)
        shares = logits.new_tensor([draft.shares[len(draft.ids)] for draft in part])[:, None]
        tokens = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True).clamp_max(logits.shape[1] - 1)
        tokens = torch.where(greedy, log_pi.argmax(-1, keepdim=True), tokens)
        logps = log_pi.gather(1, tokens)
        for draft, token, logp in zip(part, tokens[:, 0].tolist(), logps[:, 0].tolist(), strict=True):
            draft.ids.append(token)
            draft.logps.append(logp)
