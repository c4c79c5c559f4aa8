"""Guards that keep steps from being taken."""

from __future__ import annotations

import lightning as L

from lightning_agentrl.agents import Attempt, StepGuard, Verdict


class SkipSome(StepGuard):
    """Skips steps by number, as one rank says.

    Args:
        numbers: of attempted steps, from 0.
        rank: that says so; the others would step.
        verdict: what it says.
    """

    def __init__(self, numbers: list[int], rank: int = 0, verdict: str = "SKIP") -> None:
        self.numbers, self.rank, self.verdict = numbers, rank, verdict
        self.seen: list[Attempt] = []

    def before_step(self, trainer: L.Trainer, attempt: Attempt) -> tuple[Verdict, str]:
        self.seen.append(attempt)
        if trainer.global_rank == self.rank and attempt.number in self.numbers:
            return Verdict[self.verdict], f"attempt {attempt.number} is on the list"
        return Verdict.STEP, ""
