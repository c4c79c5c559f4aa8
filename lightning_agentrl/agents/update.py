"""The gradient of a mini-batch, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_agentrl.agents.gradients import sync_gradients, without_sync
from lightning_agentrl.agents.scoring import action_rows, to_columns
from lightning_agentrl.distributed import max_over_ranks
from lightning_agentrl.losses import aggregate, masked_sum, row_weights
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.types import Rollout, Scores

if TYPE_CHECKING:
    from lightning_agentrl.agents.agent import Agent

GAP = "mismatch/logp_gap_mean"


@dataclass(frozen=True)
class CurrentScores:
    """What the current weights say about the action tokens of a micro-batch, with gradient; [B, A], 0 off the mask."""

    logps: Tensor
    entropy: Tensor


def accumulate_gradients(agent: Agent, rollout: Rollout) -> dict[str, float]:
    """Backward through every micro-batch; the means of the metrics over the mini-batch.

    Rows are weighted by the totals of the whole mini-batch over all ranks, so how it is cut changes nothing.
    Data-parallel wrappers average gradients over ranks; the factor world_size turns that into the sum.
    """
    trained = rollout.trained_mask
    tokens = float(agent.reduce_sum(trained.sum().double()))
    of_policy = row_weights(
        trained,
        agent.loss_aggregation,
        norm_tokens=agent.loss_norm_tokens,
        groups_B=rollout.groups,
        gather=agent.gather,
    )
    of_values = torch.full_like(of_policy, 1 / max(tokens, 1.0))
    rows, reader = action_rows(rollout), agent.reader()
    totals: dict[str, float] = {}
    largest_gap = 0.0
    # Weights stay the same until the step, so autocast may cast them once for all micro-batches.
    with without_sync(agent), agent.cached_precision():
        for index in reader.micro_batches(rows):
            micro = rollout.select(index).to(agent.device)
            mask = micro.trained_mask
            packed = reader.pack([rows[i] for i in index])
            held = sum(len(rows[i].input_ids) for i in index)
            agent.clock.count_packed(held, packed.tokens, packed.padding_tokens if index else packed.tokens)
            for losses, metrics in micro_batch_losses(agent, micro, packed):
                parts = [
                    aggregate(x, mask, weights[index], float(agent.trainer.world_size))
                    for x, weights in zip(losses, (of_policy, of_values), strict=True)
                    if x is not None
                ]
                agent.manual_backward(torch.stack(parts).sum())
                for name, x in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(masked_sum(x.detach().double(), mask))
                if GAP in metrics and mask.any():
                    largest_gap = max(largest_gap, float(metrics[GAP].detach()[mask].max()))
            agent.clock.advance(len(index))
    sync_gradients(agent, agent.optimizers())
    means = {name: total / tokens for name, total in agent.reduce_dict(totals).items()} if tokens else {}
    if GAP in means:
        means["mismatch/logp_gap_max"] = max_over_ranks(largest_gap)
    return means


def micro_batch_losses(
    agent: Agent, micro: Rollout, packed: Packed
) -> Iterator[tuple[tuple[Tensor | None, Tensor | None], dict[str, Tensor]]]:
    """Losses of policy and values, and metrics, per action token [B, A].

    First of the actor with a shared critic, then of a separate critic.

    A generator, so that the graph of the first is gone before the second is built.
    """
    mask, critic, shared = micro.action_mask, agent.critic, agent.shared_critic
    metrics: dict[str, Tensor] = {}
    if agent.phase == "train":
        hidden = agent.actor.hidden(packed)
        token = agent.actor.token_scores(hidden, packed.targets, agent.temperature)
        scores = CurrentScores(to_columns(token.logps, mask), to_columns(token.entropy, mask))
        if micro.scores.old_logps is None:
            micro = micro.union(scores=Scores(scores.logps.detach(), entropy=scores.entropy.detach()))
            metrics = {GAP: (scores.logps - micro.rollout_logps).abs()}
        loss = agent.policy_loss(micro, scores)
        metrics = {**metrics, "policy/loss": loss, **agent.update_metrics(micro, scores)}
        value_loss = None
        if shared is not None:
            value_loss = agent.value_loss(micro, to_columns(shared(packed, hidden), mask))
            metrics = {**metrics, "critic/loss": value_loss}
        yield (loss, value_loss), metrics
    elif shared is not None:
        with torch.no_grad():
            hidden = agent.actor.hidden(packed)
        value_loss = agent.value_loss(micro, to_columns(shared(packed, hidden), mask))
        yield (None, value_loss), {"critic/loss": value_loss}
    if critic is not None and shared is None:
        value_loss = agent.value_loss(micro, to_columns(critic(packed, None), mask))
        yield (None, value_loss), {"critic/loss": value_loss}
