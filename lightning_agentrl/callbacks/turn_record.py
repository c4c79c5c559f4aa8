"""A turn as one flat dictionary of plain types: what the turn log holds and the page of a run shows."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.prompts.shown import shown
from lightning_agentrl.types import ModelInput, Rollout, Scores, Segment, Turn, input_of

DIGITS = 7  # significant ones of every number


def turn_records(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, texts: dict[int, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one dictionary for each turn. Lists of numbers have one entry per token of the reply; None: not computed.

    ``texts`` caches the texts of tokens from call to call.
    """
    texts = {} if texts is None else texts
    for row, sample in enumerate(rollout.samples):
        for turn, read, action, _, here in sample.placed_turns():
            yield {
                **_what_happened(turn),
                "continues": here.start > 0,
                **_tokens(input_of(read), action, tokenizer, texts),
                "rollout_logps": _numbers(rollout.rollout_logps, row, here),
                **_scores(rollout.scores, row, here),
                "advantages": _numbers(rollout.advantages, row, here),
                "returns": _numbers(rollout.returns, row, here),
            }


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: dict[int, str]) -> list[str]:
    """Return the text of each id by itself, special tokens too; a part of a character shows as U+FFFD."""
    new = [i for i in dict.fromkeys(ids) if i not in texts]
    if new:
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        texts.update(zip(new, decoded, strict=True))
    return [texts[i] for i in ids]


def _what_happened(turn: Turn) -> dict[str, Any]:
    return {
        "env": turn.env,
        "episode": turn.episode,
        "group": turn.group,
        "turn": turn.index,
        "policy_version": turn.policy_version,
        "observation": turn.observation,
        "thought": turn.thought,
        "thought_tokens": turn.thought_tokens,
        "parsed_action": turn.parsed_action,
        "action": turn.action,
        "valid": turn.valid,
        "reward": _number(turn.reward),
        "env_reward": _number(turn.env_reward),
        "episode_return": _number(turn.episode_return),
        "terminated": turn.terminated,
        "truncated": turn.truncated,
        "stop": None if turn.stop is None else turn.stop.value,
        "success": turn.success,
        "history_cuts": turn.history_cuts,
        "hit_token_cap": turn.hit_token_cap,
        "env_seconds": round(turn.env_seconds, 4),
        "engine_seconds": round(turn.engine_seconds, 4),
        "env_errors": list(turn.env_errors),
        "lost": list(turn.lost),
        "asked_again": turn.asked_again,
        "branch_returns": [_number(value) for value in turn.branch_returns],
        "metrics": {name: _number(value) for name, value in turn.metrics.items()},
        "image": None if turn.image is None else base64.b64encode(turn.image).decode(),
    }


def _tokens(
    prompt: ModelInput, action: Segment, tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]
) -> dict[str, Any]:
    reply_ids = list(action.ids)
    return {
        "prompt_ids": list(prompt.ids),
        "prompt": shown(tokenizer, prompt),
        "reply_ids": reply_ids,
        "reply": tokenizer.decode(reply_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "tokens": token_texts(tokenizer, reply_ids, texts),
    }


def _scores(scores: Scores, row: int, here: slice) -> dict[str, list[float | None] | None]:
    names = ("old_logps", "ref_logps", "values", "entropy")
    return {name: _numbers(getattr(scores, name), row, here) for name in names}


def _numbers(x_BA: Tensor | None, row: int, here: slice) -> list[float | None] | None:
    return None if x_BA is None else [_number(x) for x in x_BA[row, here].tolist()]


def _number(x: float) -> float | None:
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None  # JSON has no NaN
