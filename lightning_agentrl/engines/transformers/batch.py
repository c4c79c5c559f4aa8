"""Replies that are sampled at the same time: others join between two tokens, and those that are done leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_agentrl.engines.base import SamplingRequest
from lightning_agentrl.engines.transformers.admission import Asked
from lightning_agentrl.engines.transformers.conversations import Conversations, read_on
from lightning_agentrl.engines.transformers.rows import Rows, read
from lightning_agentrl.models.attention.tree import no_mask
from lightning_agentrl.models.language_model import LanguageModel, vocabulary_logits
from lightning_agentrl.models.loading import UNIQUE_POSITIONS
from lightning_agentrl.models.prefix_tree import Keys, common_prefix_length, lay_out
from lightning_agentrl.models.vision import find_tokens
from lightning_agentrl.types.model_input import ModelInput, check_text_only
from lightning_agentrl.types.transfer import integers

LEAST_PREFIX = 8  # tokens; reading fewer again costs less than keeping them apart

RowsOf = Callable[[Sequence[int]], Rows]  # makes the rows of the prompts of these numbers, once it is clear who goes on


def check_prompt(policy: LanguageModel, prompt: ModelInput) -> None:
    """Refuse a prompt that the policy cannot read.

    Raises:
        ValueError: it has an image, and the policy reads text only or other images.
    """
    if policy.image_reader is None:
        check_text_only([prompt], "TransformersEngine")
    else:
        for image in prompt.images:
            policy.image_reader.grid(image)


class TreePrefill:
    """Prefill as a prefix tree: a common prefix is computed once, that of all prompts once for many batches.

    Prefixes are compared by keys, so prompts with different images share nothing behind the first of them.
    """

    whole_rows: ClassVar[bool] = True  # are in the cache, so rows can join and leave

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._prefix: Keys = ()
        self._next = 0  # position behind the prefix; an image takes fewer than it has tokens
        self._prefix_cache = DynamicCache()

    def forget(self) -> None:
        """Drop the kept prefix, as the weights have changed."""
        # The cache holds whole rows, even if layers have windows: a tree is not a row.
        self._prefix, self._next, self._prefix_cache = (), 0, DynamicCache()

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, RowsOf]:
        """Read prompts.

        Args:
            prompts: to be read.
            beside: those of the replies that are being sampled meanwhile, whose prefix is worth keeping too.

        Returns:
            Hidden states [B, H] of their last tokens, and what makes the rows of some of them.
        """
        self.keep_common_prefix([*prompts, *beside])
        past, device = len(self._prefix), self.policy.lm.device
        layout = lay_out([prompt.keys[past:] for prompt in prompts], device)
        ends = [layout.find(k, (len(prompt) - past - 1,))[0] for k, prompt in enumerate(prompts)]
        cache = _branched(self._prefix_cache)  # since the model appends to it
        positions, images = self._next + layout.tree.positions, (prompt.images for prompt in prompts)
        tokens = find_tokens(layout.keys, positions, layout.tree.ends, images, self.policy.image_reader)
        hidden_N = read(
            self.policy,
            tokens.ids[None],
            tokens.positions[..., None, :],
            tokens.images,
            attention_mask=no_mask(device),
            cache=cache,
            tree=layout.tree,
            **{UNIQUE_POSITIONS: integers(sorted(set(ends)), device)},
        )[0]
        last_N1 = _last(tokens.positions)[:, None]

        def rows_of(numbers: Sequence[int]) -> Rows:
            prefix = [*range(past)]
            columns_BL = _left_padded([prefix + [past + p for p in layout.places(k)] for k in numbers], device)
            rows = DynamicCache()
            for index, layer in enumerate(cache.layers):
                keys, values = cast(Any, layer).keys[0], cast(Any, layer).values[0]
                rows.update(keys[:, columns_BL].transpose(0, 1), values[:, columns_BL].transpose(0, 1), index)
            return Rows(rows, _seen([prompts[k] for k in numbers], device), last_N1[[ends[k] for k in numbers]])

        return hidden_N[ends], rows_of

    def keep_common_prefix(self, prompts: Sequence[ModelInput]) -> None:
        """Keep the cached prefix if all prompts begin with it and it is not much too short; else compute theirs.

        At least one token of each prompt is left out, since its hidden state is needed. A few tokens are not kept. On a
        GPU none are: FlexAttention reads no tree behind a past, and dense attention has a mask of all pairs of tokens.
        """
        rows = [prompt.keys for prompt in prompts]
        common = min(common_prefix_length(rows), min(map(len, rows)) - 1)
        common = len(prompts[0].head(common))
        if common < LEAST_PREFIX or self.policy.lm.device.type == "cuda":
            common = 0
        kept = self._prefix
        if common >= len(kept) and rows[0][: len(kept)] == kept and common <= 2 * len(kept):
            return
        self.forget()
        if common:
            self._prefix = rows[0][:common]
            order = torch.arange(common, device=self.policy.lm.device)
            ends, reader = torch.full_like(order, common), self.policy.image_reader
            tokens = find_tokens(self._prefix, order, ends, [prompts[0].images], reader)
            positions = tokens.positions[..., None, :]
            read(self.policy, tokens.ids[None], positions, tokens.images, cache=self._prefix_cache)
            self._next = int(_last(tokens.positions)[-1]) + 1


def _branched(cache: DynamicCache) -> DynamicCache:
    """Return a cache that begins with what is in another one, and grows apart from it."""
    branched = DynamicCache()
    for index, layer in enumerate(cast(Any, cache).layers):
        branched.update(layer.keys, layer.values, index)
    return branched


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return [B, L]: rows of integers that end in the same column, 0 before each."""
    width = max(map(len, rows))
    return integers([x for row in rows for x in (*[0] * (width - len(row)), *row)], device).view(len(rows), width)


def _seen(prompts: Sequence[ModelInput], device: torch.device) -> Tensor:
    """Return int64 [B, L]: 1 on the tokens of left-padded prompts."""
    return _left_padded([[1] * len(prompt) for prompt in prompts], device)


def _last(positions: Tensor) -> Tensor:
    """Return [N]: for each token the position that the next text token follows."""
    return positions if positions.dim() == 1 else positions.amax(0)


class PaddedPrefill:
    """Prefill of padded prompts side by side, for models whose layers cannot read a tree.

    What such layers keep of the past may be anything, so no row joins or leaves before all are done.
    """

    whole_rows: ClassVar[bool] = False

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy

    def forget(self) -> None:
        """Do nothing: no prefix is kept."""

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, RowsOf]:
        """Read prompts; see :class:`TreePrefill`. Rows cannot leave, so they are those of all prompts in any case."""
        device, cache = self.policy.lm.device, DynamicCache(config=self.policy.lm.config)
        seen = _seen(prompts, device)
        width = seen.shape[1]
        keys = [key for prompt in prompts for key in (*[0] * (width - len(prompt)), *prompt.keys)]
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        ends = torch.arange(1, len(prompts) + 1, device=device).repeat_interleave(width) * width
        images, reader = (prompt.images for prompt in prompts), self.policy.image_reader
        tokens = find_tokens(keys, positions.flatten(), ends, images, reader)
        ids, positions = tokens.ids.view(seen.shape), tokens.positions.unflatten(-1, seen.shape)
        hidden = read(self.policy, ids, positions, tokens.images, attention_mask=seen, cache=cache)
        rows = Rows(cache, seen, _last(tokens.positions).view(seen.shape)[:, -1:])
        return hidden[:, -1], lambda numbers: rows


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
        conversations: what players have read and said before; only used where rows can join and leave.
        decode: gives the text of sampled ids.
    """

    def __init__(
        self,
        prefill: TreePrefill | PaddedPrefill,
        stop_token_ids: Collection[int],
        conversations: Conversations,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.drafts: list[Draft] = []
        self.new: Sequence[Asked] = ()  # that the last step has begun, or failed to begin
        self.prefill = prefill
        self.stop_token_ids = stop_token_ids
        self.conversations = conversations
        self.decode = decode
        self._rows: Rows | None = None  # one for each draft

    def step(self, new: Sequence[Asked]) -> list[Draft]:
        """Sample the first token of new replies, or where there are none the next one of all; return what is done."""
        before, rows_of, self.new = self.drafts, None, new
        if new:
            sampled = [Draft(asked) for asked in new]
            self.drafts = [*before, *sampled]
            hidden, rows_of = self._prefilled(sampled, [draft.request.prompt for draft in before])
        else:
            assert self._rows is not None
            sampled = before
            hidden = self._rows.read_on(self.prefill.policy, [0 if draft.over else draft.ids[-1] for draft in sampled])
        logits = vocabulary_logits(self.prefill.policy.lm, hidden)
        goes_on = [i for i, draft in enumerate(sampled) if not draft.over]
        going = [sampled[i] for i in goes_on]
        sample(going, logits if len(going) == len(sampled) else logits[goes_on])
        for draft in going:
            draft.done = (
                draft.ids[-1] in self.stop_token_ids
                or len(draft.ids) >= draft.request.max_tokens
                or self._says_stop(draft)
            )
        self.drafts = self._let_go(before)
        if rows_of is not None:
            self.drafts = [*self.drafts, *self._take_in(sampled, rows_of)]
        return [draft for draft in going if draft.done]

    def _says_stop(self, draft: Draft) -> bool:
        """Return whether a reply has come to a text that ends it."""
        return bool(draft.request.stop) and any(stop in self.decode(draft.ids) for stop in draft.request.stop)

    def _prefilled(self, drafts: Sequence[Draft], beside: Sequence[ModelInput]) -> tuple[Tensor, RowsOf]:
        """Read the prompts of new replies: those that go on from a conversation, what they add to it."""
        prompts = [draft.request.prompt for draft in drafts]
        shared = common_prefix_length([prompt.keys for prompt in prompts]) if len(prompts) > 1 else 0
        found = [self.conversations.find(draft.request, shared) for draft in drafts]
        going_on = [i for i, kept in enumerate(found) if kept is not None]
        if not going_on:
            return self.prefill(prompts, beside)
        fresh = [i for i, kept in enumerate(found) if kept is None]
        kept = [kept for kept in found if kept is not None]
        hidden, rows = read_on(self.prefill.policy, [prompts[i] for i in going_on], kept)
        if not fresh:
            return hidden, lambda numbers: rows.kept(numbers)
        fresh_hidden, fresh_rows = self.prefill([prompts[i] for i in fresh], beside)
        places = {number: place for place, number in enumerate([*fresh, *going_on])}

        def rows_of(numbers: Sequence[int]) -> Rows:
            new, old = [i for i in fresh if i in numbers], [i for i in going_on if i in numbers]
            parts = [fresh_rows([fresh.index(i) for i in new])] if new else []
            parts += [rows.kept([going_on.index(i) for i in old])] if old else []
            if len(parts) > 1:
                parts[0].join(parts[1])
            order = [*new, *old]
            return parts[0].kept([order.index(i) for i in numbers])

        order = torch.tensor([places[i] for i in range(len(prompts))], device=hidden.device)
        return torch.cat([fresh_hidden, hidden])[order], rows_of

    def _let_go(self, drafts: list[Draft]) -> list[Draft]:
        """Drop the rows of replies that are over, and return those that are left."""
        left = [i for i, draft in enumerate(drafts) if not draft.over]
        if self.prefill.whole_rows:
            for row, draft in enumerate(drafts):
                if draft.done:
                    self.conversations.keep(draft.request, draft.ids, cast(Rows, self._rows), row)
        if not left:
            self._rows = None
            return []
        if not self.prefill.whole_rows or len(left) == len(drafts):
            return drafts
        self._rows = cast(Rows, self._rows).kept(left)
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
