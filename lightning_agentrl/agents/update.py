"""Computation of a mini-batch's gradient, micro-batch by micro-batch, and the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.agents.models import random_from
from lightning_agentrl.agents.optim import GROUPS, clip_by_group, step_or_discard, sync_gradients, without_sync
from lightning_agentrl.agents.scoring import action_rows, evaluation_mode, of_turns, score_policy, to_columns
from lightning_agentrl.agents.selection import first_fault
from lightning_agentrl.distributed import Max, Mean, Number, over_ranks
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.losses import aggregate, first_tokens, masked_sum, row_weights
from lightning_agentrl.models.allocator import FreedMemory
from lightning_agentrl.models.critic import popart_head, values_of
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.types import Rollout, Scores

GAP = "mismatch/logp_gap_mean"
FREED_MEMORY = FreedMemory()  # one object per process, shared by all agents
LOSSES = ("policy/loss", "critic/loss")


@dataclass(frozen=True)
class CurrentScores:
    """Scores of the current weights at the action tokens of a micro-batch, with gradients.

    Args:
        logps: log-probs [B, A] in nats, 0 off the action mask.
        entropy: entropies [B, A] of the token distributions in nats, 0 off the action mask.
    """

    logps: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Gradient:
    """Summary of a mini-batch's gradient; the gradient itself is stored in the parameters.

    Args:
        means: means of losses and metrics over the trained tokens of the mini-batch on all ranks.
        fault: description of the first non-finite loss on this rank, with its turns; empty if all losses are finite.
        norms: gradient norms before clipping, by parameter group; empty under ZeRO, which computes them in its step.
        held: names of the parameter groups that do not change in this phase.
    """

    means: dict[str, float]
    fault: str
    norms: dict[str, float]
    held: tuple[str, ...]

    @property
    def loss(self) -> Tensor:
        """Sum of the mean losses, without gradient."""
        return torch.tensor(self.means.get("policy/loss", 0.0) + self.means.get("critic/loss", 0.0))


def compute_gradient(agent: Any, rollout: Rollout, first: bool) -> Gradient:
    """Compute the gradient of a mini-batch over all ranks, clipped by parameter group.

    Args:
        agent: an ``Agent``, whose losses are called.
        rollout: the rows of the mini-batch on this rank.
        first: whether this is the first step since the rollout was scored.
    """
    optimizer, held = agent.optimizers(), () if agent.phase == "train" else ("actor",)
    means, fault, tokens = accumulate_gradients(agent, rollout, first)
    model, backward = agent.trainer.strategy.model, agent.manual_backward
    sync_gradients(model, optimizer, agent.steps.masters, agent.trainer.world_size, backward, held)
    # DDP and masked tokens leave gradients of 0, with which Adam would still change weights.
    norms = clip_by_group(optimizer, agent.optim.limits, held if tokens else GROUPS)
    return Gradient(means, fault, norms, held)


def take_step(agent: Any, gradient: Gradient, allowed: bool, first: bool) -> dict[str, float]:
    """Take the optimizer step or discard the gradient, and fit a critic that learns without gradients.

    Args:
        agent: an ``Agent``.
        gradient: summary of the gradient in the parameters.
        allowed: whether to step; the same on all ranks.
        first: whether this is the first step since the rollout was scored.

    Returns:
        Gradient norms before clipping by parameter group, also under ZeRO.
    """
    optimizer = agent.optimizers()
    norms = gradient.norms | step_or_discard(optimizer, agent.trainer.strategy, allowed)
    optimizer.zero_grad(set_to_none=True)  # free the memory of gradients before replies are sampled
    agent.steps.count(agent, gradient.held, allowed)
    if agent.critic is not None and agent.critic.fitted:
        not_finite = agent.steps.not_finite > 0
        agent.critic.fit(None if not_finite else agent.ranks.sum, new_policy=first and agent.phase == "train")
    if agent.trainer.is_last_batch and agent.device.type == "cpu":
        FREED_MEMORY.iteration_done()
    return norms


def accumulate_gradients(agent: Any, rollout: Rollout, first: bool) -> tuple[dict[str, float], str, int]:
    """Run the backward pass of every micro-batch.

    Rows are weighted by totals of the whole mini-batch over all ranks, so the split into micro-batches does not change
    the gradient. Data-parallel wrappers average gradients over ranks; the factor world size turns the average into a
    sum. Sums of metrics stay on the device until the last micro-batch, so that the GPU never waits.

    Args:
        agent: an ``Agent``, whose losses are called.
        rollout: the rows of the mini-batch on this rank.
        first: whether this is the first step since the rollout was scored.

    Returns:
        Means of losses and metrics, description of a non-finite loss or an empty string, and the number of trained
        tokens in the mini-batch on all ranks.
    """
    reader, ranks, trains_policy = agent.reader, agent.ranks, agent.phase == "train"
    if trains_policy:
        rollout = _ready_for_loss(agent, rollout, first)
    trained = rollout.trained_mask
    policy_weights_B = row_weights(
        trained, agent.aggregation, norm_tokens=agent.norm_tokens, groups_B=rollout.groups, gather=ranks.gather
    )
    own_tokens = int(trained.sum())
    tokens = int(ranks.sum(torch.tensor(own_tokens)))
    value_weights_B = torch.full_like(policy_weights_B, 1 / max(tokens, 1))
    rows = action_rows(rollout)
    sums: dict[str, Tensor] = {}  # sums of metrics over trained tokens, float64
    gaps: list[Tensor] = []  # largest log-prob mismatch of each micro-batch, float64
    losses: list[tuple[str, Tensor, Rollout]] = []  # name, loss per token, and micro-batch
    # Dropout is seeded by the index of the step, since checkpoints do not contain random states.
    seed = derive_seed(agent.datamodule.seed, agent.policy_version, agent.trainer.global_rank)
    # Weights stay the same until the step, so autocast may cast them once for all micro-batches.
    with without_sync(agent.trainer.strategy.model), reader.precision(), random_from(seed, ranks.device):
        for index, packed in reader.packs(rows):
            micro = rollout.select(index).to(ranks.device)
            held = sum(rows[i].length for i in index)
            padding = 0 if (index or reader.group) and packed.padding is None else packed.tokens - held
            agent.clock.count_packed(held, packed.tokens, padding)
            for policy_loss, value_loss, metrics in micro_batch_losses(agent, micro, packed):
                means = [
                    aggregate(x, micro.trained_mask, weights_B[index], float(ranks.count))
                    for x, weights_B in ((policy_loss, policy_weights_B), (value_loss, value_weights_B))
                    if x is not None
                ]
                loss = torch.stack(means).sum()
                if trains_policy or loss.requires_grad:  # a fitted critic has no gradient
                    agent.manual_backward(loss)
                for name, x in metrics.items():
                    sums[name] = sums.get(name, 0.0) + masked_sum(x.detach().double(), micro.trained_mask)
                if GAP in metrics and index:
                    gaps.append(torch.where(micro.trained_mask, metrics[GAP].detach(), 0.0).max().double())
                losses += [(name, metrics[name].detach(), micro) for name in LOSSES if name in metrics]
            agent.clock.advance(len(index))
    numbers = torch.stack([*sums.values(), *gaps]).tolist() if sums else []
    totals, gap = dict(zip(sums, numbers, strict=False)), max([0.0, *numbers[len(sums) :]])
    watch = agent.steps.gradient_watch
    fault = "the gradient is not finite" if watch is not None and not watch.finite() else ""
    if not all(math.isfinite(totals[name]) for name in LOSSES if name in totals):
        fault = first_fault(losses)
    own: dict[str, Number] = {name: Mean(total, own_tokens) for name, total in totals.items()}
    if GAP in totals:
        own["mismatch/logp_gap_max"] = Max(gap)
    return over_ranks(own) if tokens else {}, fault, tokens


def _ready_for_loss(agent: Any, rollout: Rollout, first: bool) -> Rollout:
    """Add picked tokens to the mini-batch, and under a bypass use the engine's log-probs as old log-probs."""
    current = rollout.scores.old_logps if first else None
    if agent.correction is not None and agent.correction.bypass:
        rollout = rollout.union(scores=Scores(old_logps=rollout.rollout_logps))
    if not agent.needs.mini_batch_logps:
        return rollout
    if current is None:
        with evaluation_mode(agent):
            scores, _ = score_policy(agent.actor, rollout, replace(agent.reader, advance=lambda count: None))
        torch.clear_autocast_cache()  # the cache holds weights that were cast without gradients
        current = scores.old_logps
    return replace(rollout, picked=agent.pick_tokens(rollout, current))


def micro_batch_losses(
    agent: Any, micro: Rollout, packed: Packed
) -> Iterator[tuple[Tensor | None, Tensor | None, dict[str, Tensor]]]:
    """Yield policy loss, value loss and metrics, each per action token [B, A]; a loss is None if it is not trained.

    The first item is for the actor and for a critic that shares the actor's trunk; the second item is for a separate
    critic. So the graph of the first item is freed before the graph of the second item is built.
    """
    models, mask, critic = agent.models, micro.action_mask, agent.models.critic
    shared = critic is not None and critic.shares_trunk
    if agent.phase == "train":
        metrics: dict[str, Tensor] = {}
        hidden = models.actor.hidden(packed)
        token = models.actor.token_scores(hidden, packed.targets, agent.reader.temperature)
        scores = CurrentScores(to_columns(token.logps, mask), to_columns(token.entropy, mask))
        if micro.scores.old_logps is None:
            micro = micro.union(scores=Scores(scores.logps.detach(), entropy=scores.entropy.detach()))
            metrics = {GAP: (scores.logps - micro.rollout_logps).abs()}
        loss = _connected(agent.policy_loss(micro, scores), micro, scores.logps)
        metrics |= {"policy/loss": loss, **agent.update_metrics(micro, scores)}
        value_loss = None
        if shared:
            value_loss = metrics["critic/loss"] = _value_loss(agent, micro, packed, hidden)
        yield loss, value_loss, metrics
    elif shared:
        with torch.no_grad():
            hidden = models.actor.hidden(packed)
        value_loss = _value_loss(agent, micro, packed, hidden)
        yield None, value_loss, {"critic/loss": value_loss}
    if critic is not None and not shared:
        value_loss = _value_loss(agent, micro, packed, None)
        yield None, value_loss, {"critic/loss": value_loss}


def _value_loss(agent: Any, micro: Rollout, packed: Packed, hidden_RH: Tensor | None) -> Tensor:
    """Return the agent's value loss [B, A]; for a PopArt critic, of normalized values and returns.

    Args:
        agent: an ``Agent`` with a critic.
        micro: rows of a micro-batch.
        packed: packed inputs of these rows.
        hidden_RH: hidden states of the actor if the critic shares the actor's trunk, else None. A fitted critic stores
            these hidden states.
    """
    mask, critic = micro.action_mask, agent.models.critic
    if hidden_RH is not None and critic.fitted:
        assert micro.returns is not None
        begins = first_tokens(mask, micro.turn_ids) & micro.trained_mask
        critic.take_in(hidden_RH.detach()[begins[mask]], micro.returns[begins])
    values = to_columns(values_of(critic, packed, hidden_RH), mask)
    if hidden_RH is not None:
        values = of_turns(critic, values, micro)
    head = popart_head(critic)
    if head is not None and micro.scores.values is not None and micro.returns is not None:
        scores = replace(micro.scores, values=head.normalize(micro.scores.values))
        micro = replace(micro, scores=scores, returns=head.normalize(micro.returns))
        values = head.normalize(values)
    return _connected(agent.value_loss(micro, values), micro, values)


def _connected(loss_BA: Tensor, micro: Rollout, scores_BA: Tensor) -> Tensor:
    """Return the loss; without rows, attach it to the graph, since other ranks may need this backward pass."""
    return loss_BA if len(micro) else loss_BA + scores_BA.sum()
