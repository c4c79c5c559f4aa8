"""The passes that score a rollout before it is trained on: which models have to be read, and reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_agentrl.agents.scoring import action_rows, bootstrap_rows, score_policy, score_values
from lightning_agentrl.types import Rollout, Scores

if TYPE_CHECKING:
    from lightning_agentrl.agents.agent import Agent


def score_rollout(agent: Agent, rollout: Rollout) -> Rollout:
    """Add log-probs of actor and reference, entropy, values and bootstrap values; what is there already is kept."""
    reader, shared = agent.reader(), agent.shared_critic
    tokens = sum(len(row.ids) for row in action_rows(rollout))
    agent.clock.count("score", turns=len(rollout.turns), tokens=tokens)
    bootstrap_values = None
    if lacks_policy(agent, rollout):
        scores, bootstrap_values = score_policy(agent.actor, rollout, reader, shared, agent.needs_sum_pi_squared)
        rollout = rollout.union(scores=scores)
    if agent.needs_reference and rollout.scores.ref_logps is None:
        scores, _ = score_policy(agent.references[0], rollout, reader)
        rollout = rollout.union(scores=Scores(ref_logps=scores.old_logps))
    if agent.critic is not None and bootstrap_values is None:
        values, bootstrap_values = score_values(agent.actor, agent.critic, rollout, reader)
        rollout = rollout.union(scores=Scores(values=values))
    if bootstrap_values is not None:
        rollout = rollout.union(bootstrap_values=bootstrap_values)
    return rollout


def lacks_policy(agent: Agent, rollout: Rollout) -> bool:
    """Whether the policy has to be read before the update; what was read already is kept."""
    correction = agent.correction
    ratio = agent.datamodule.steps_per_iteration > 1 and not (correction is not None and correction.bypass)
    shared = agent.shared_critic is not None  # values need the pass anyway
    loss = agent.needs_mini_batch_logps or (correction is not None and correction.needs_old_logps)
    wanted = ratio or shared or loss or agent.needs_old_logps or agent.needs_sum_pi_squared
    return wanted and rollout.scores.old_logps is None


def rows_to_score(agent: Agent, rollout: Rollout) -> int:
    """Rows that the passes of :func:`score_rollout` read together."""
    ends = len(bootstrap_rows(rollout)) if agent.critic is not None else 0
    shared = agent.shared_critic is not None
    policy = len(rollout) + ends * shared if lacks_policy(agent, rollout) else 0
    reference = len(rollout) if agent.needs_reference and rollout.scores.ref_logps is None else 0
    values = len(rollout) + ends if agent.critic is not None and not (shared and policy) else 0
    return policy + reference + values
