"""Losses and gradients that are not finite: name their turns, and take no step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_agentrl.agents.hooks import Verdict
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.types import Rollout, Turn

SHOWN = 3  # turns or tensors that a sentence names


def first_fault(losses: Sequence[tuple[str, Tensor, Rollout]]) -> str:
    """Return the first loss per token that is not finite, with its turns.

    Args:
        losses: name, loss [B, A] and micro-batch of each.
    """
    for name, loss, micro in losses:
        if turns := turns_at(micro, micro.trained_mask & ~loss.isfinite()):
            return f"{name} of {named(turns)} is not finite"
    return ""


class FiniteSteps:
    """Skip steps whose loss or gradient is not finite; stop the run after several in a row.

    Args:
        limit: number of such steps in a row that stops the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def judge(self, fault: str, norms: Mapping[str, float]) -> tuple[Verdict, str]:
        """Return whether to take a step, and if not, why; the same on all ranks. Every rank must call it.

        Args:
            fault: the loss on this rank that is not finite, with its turns; empty: none.
            norms: of the whole gradient by group, as far as they are known.
        """
        wrong = [f"the gradient of the {name} has the norm {x}" for name, x in norms.items() if not math.isfinite(x)]
        parts = all_gather((fault, ", ".join(wrong)))
        reason = "; ".join([own for own, _ in parts if own]) or next((norm for _, norm in parts if norm), "")
        self.in_a_row = self.in_a_row + 1 if reason else 0
        if self.in_a_row >= self.limit:
            return Verdict.STOP, f"{reason}, in {self.in_a_row} steps in a row (model.init_args.optim.max_not_finite)"
        return (Verdict.SKIP, reason) if reason else (Verdict.STEP, "")


def named(turns: Sequence[Turn]) -> str:
    """Return the places of turns, the first few by name."""
    places = "; ".join(f"environment {t.env}, episode {t.episode}, turn {t.index}" for t in turns[:SHOWN])
    return places + (f" and {len(turns) - SHOWN} more turns" if len(turns) > SHOWN else "")


def turns_at(rollout: Rollout, where_BA: Tensor) -> list[Turn]:
    """Return the turns of the tokens that are set, each once."""
    found = []
    for row in where_BA.any(1).nonzero().flatten().tolist():
        wanted = set(rollout.turn_ids[row][where_BA[row]].tolist())
        found += [turn for turn in rollout.samples[row].turns if turn.index in wanted]
    return found
