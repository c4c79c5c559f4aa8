"""Numbers of one rollout, over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_agentrl.metrics.episodes import succeeded
from lightning_agentrl.types import Rollout


def rollout_metrics(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """What happened in a prepared rollout.

    Episodes are those that ended in it, counted with all their turns, also from earlier rollouts. ``reduce`` sums a
    tensor over ranks. A number that nothing gives (no episode ended, no reference) is left out.
    """
    turns, mask = rollout.turns, rollout.action_mask
    ended = [turn for turn in turns if turn.done]
    counts = {
        "turns": len(turns),
        "reward": sum(turn.reward for turn in turns),
        "valid": sum(turn.valid for turn in turns),
        "capped": sum(turn.hit_token_cap for turn in turns),
        "cuts": sum(turn.history_cuts for turn in turns),
        "tokens": int(mask.sum()),
        "ended": len(ended),
        "episode_turns": sum(turn.index + 1 for turn in ended),
        "episode_return": sum(turn.episode_return for turn in ended),
        "truncated": sum(turn.truncated for turn in ended),
        "success": sum(succeeded(turn) for turn in ended),
        **_token_sums(rollout),
    }
    names = sorted(counts)
    summed = reduce(torch.tensor([float(counts[name]) for name in names], dtype=torch.float64))
    total = dict(zip(names, summed.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    numbers = {
        "rollout/reward_per_turn": total["reward"] / total["turns"],
        "rollout/valid_action_ratio": total["valid"] / total["turns"],
        "rollout/reply_tokens": total["tokens"] / total["turns"],
        "rollout/token_cap_ratio": total["capped"] / total["turns"],
        "rollout/history_cuts": total["cuts"],
        "rollout/episodes": total["ended"],
    }
    if total["ended"]:
        numbers["rollout/success"] = total["success"] / total["ended"]
        numbers["rollout/return"] = total["episode_return"] / total["ended"]
        numbers["rollout/episode_turns"] = total["episode_turns"] / total["ended"]
        numbers["rollout/truncated_ratio"] = total["truncated"] / total["ended"]
    if "kl" in total:
        numbers["kl/reference"] = total["kl"] / tokens
    if "entropy" in total:
        numbers["rollout/entropy"] = total["entropy"] / tokens
    if "gap" in total:
        numbers["mismatch/logp_gap_mean"] = total["gap"] / tokens
    if "return_sum" in total:
        numbers["critic/value_mean"] = total["value_sum"] / tokens
        numbers["critic/return_mean"] = total["return_sum"] / tokens
    return numbers


def _token_sums(rollout: Rollout) -> dict[str, float]:
    scores, mask = rollout.scores, rollout.action_mask

    def total(x: Tensor) -> float:
        return float(torch.where(mask, x, 0.0).double().sum())

    sums: dict[str, float] = {}
    if scores.old_logps is not None:
        sums["gap"] = total((scores.old_logps - rollout.rollout_logps).abs())
        if scores.ref_logps is not None:
            sums["kl"] = total(scores.old_logps - scores.ref_logps)
    if scores.entropy is not None:
        sums["entropy"] = total(scores.entropy)
    if scores.values is not None and rollout.returns is not None:
        sums |= {"value_sum": total(scores.values), "return_sum": total(rollout.returns)}
    return sums
