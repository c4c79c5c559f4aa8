"""What has to be computed for a rollout before and during its update; nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from lightning_agentrl.types import ForkPlan, Scores


@dataclass(frozen=True)
class Needs:
    """What estimator, loss, correction and agent declare; ``a | b`` is what either of them needs.

    Args:
        old_logps: log-probs and entropy of the sampled tokens before the update. Where an iteration is one optimizer
            step without dropout and nothing needs them earlier, they are those of the step itself, and their pass is
            left out.
        ref_logps: log-probs under the reference: the frozen initial policy, or another model such as a teacher.
        values: values of the sampled tokens, and of the states where the rollout is cut.
        sum_pi_squared: sum over the vocabulary of squared probabilities, at each sampled token.
        mini_batch_logps: current log-probs of a whole mini-batch before its first micro-batch.
        greedy_baseline: one greedy episode from each start state.
        forks: continuations from the states of the rollout; None: none.
    """

    old_logps: bool = False
    ref_logps: bool = False
    values: bool = False
    sum_pi_squared: bool = False
    mini_batch_logps: bool = False
    greedy_baseline: bool = False
    forks: ForkPlan | None = None

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)})

    @property
    def policy_pass(self) -> bool:
        """Whether the policy has to be read before the update."""
        return self.old_logps or self.sum_pi_squared or self.mini_batch_logps


@contextmanager
def naming_missing(scores: Scores) -> Iterator[None]:
    """Add to the errors of what reads scores which of them were not computed."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        missing = [f.name for f in fields(scores) if getattr(scores, f.name) is None]
        error.add_note(f"scores that were not computed: {', '.join(missing)}; declare in `needs` what is read")
        raise
