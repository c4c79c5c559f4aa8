"""The gradient of a mini-batch, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.agents.finite import LossFault, named
from lightning_agentrl.agents.models import Models
from lightning_agentrl.agents.scoring import Reader, action_rows, of_turns, to_columns
from lightning_agentrl.distributed import Ranks, max_over_ranks
from lightning_agentrl.losses import AggregationMode, aggregate, first_tokens, masked_sum, row_weights
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.models.critic import Critic, values_of
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.types import Rollout, Scores

GAP = "mismatch/logp_gap_mean"
LOSSES = ("policy/loss", "critic/loss")


@dataclass(frozen=True)
class CurrentScores:
    """What the current weights say about the action tokens of a micro-batch, with gradient.

    Args:
        logps: log-probs [B, A] in nats, 0 off the action mask.
        entropy: of the whole distribution [B, A] in nats, 0 off the action mask.
    """

    logps: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Losses:
    """The losses of a mini-batch; each function gives numbers per action token [B, A].

    Args:
        policy: loss of the actor; None: the actor is not trained.
        values: loss of the critic, given the current values.
        metrics: what is logged besides the losses.
        aggregation: how the policy loss is averaged; in the value loss all tokens count equally.
        norm_tokens: see :func:`lightning_agentrl.losses.row_weights`.
    """

    policy: Callable[[Rollout, CurrentScores], Tensor] | None
    values: Callable[[Rollout, Tensor], Tensor]
    metrics: Callable[[Rollout, CurrentScores], dict[str, Tensor]]
    aggregation: AggregationMode = "token-mean"
    norm_tokens: int | None = None


def accumulate_gradients(
    models: Models,
    rollout: Rollout,
    losses: Losses,
    reader: Reader,
    ranks: Ranks,
    clock: StageClock,
    backward: Callable[[Tensor], None],
    gradients_are_finite: Callable[[], Tensor],
) -> tuple[dict[str, float], str, int]:
    """Run the backward pass of every micro-batch.

    Rows are weighted by the totals of the whole mini-batch over all ranks, so how it is split changes nothing.
    Data-parallel wrappers average gradients over ranks; the factor world size turns that into the sum.

    Args:
        models: those that are trained.
        rollout: the rows of the mini-batch on this rank.
        losses: of its tokens.
        reader: how rows are cut and packed, and the temperature of log-probs.
        ranks: of the run.
        clock: counts packed tokens and finished rows.
        backward: runs the backward pass of one loss.
        gradients_are_finite: a scalar, asked for after each micro-batch.

    Returns:
        Means of losses and metrics over the trained tokens of the mini-batch on all ranks; the first loss or gradient
        on this rank that is not finite, named with its turn or with its micro-batch, empty if there is none; and the
        number of those tokens.
    """
    trained = rollout.trained_mask
    policy_weights_B = row_weights(
        trained, losses.aggregation, norm_tokens=losses.norm_tokens, groups_B=rollout.groups, gather=ranks.gather
    )
    tokens = int(ranks.sum(trained.sum()))
    value_weights_B = torch.full_like(policy_weights_B, 1 / max(tokens, 1))
    rows = action_rows(rollout)
    found = Found(ranks.device)
    for number, index in enumerate(reader.micro_batches(rows)):
        micro = rollout.select(index).to(ranks.device)
        packed = reader.pack([rows[i] for i in index])
        held = sum(len(rows[i].input_ids) for i in index)
        padding = 0 if index and packed.padding is None else packed.tokens - held
        clock.count_packed(held, packed.tokens, padding)
        for parts, metrics in micro_batch_losses(models, micro, packed, losses, reader.temperature):
            means = [
                aggregate(x, micro.trained_mask, weights_B[index], float(ranks.count))
                for x, weights_B in zip(parts, (policy_weights_B, value_weights_B), strict=True)
                if x is not None
            ]
            loss = torch.stack(means).sum()
            if losses.policy is not None or loss.requires_grad:  # a critic that is fitted has no gradient
                backward(loss)
            found.losses(metrics, micro)
        found.gradient(gradients_are_finite(), number, micro)
        clock.advance(len(index))
    totals, largest_gap, fault = found.read()
    numbers = {name: total / tokens for name, total in ranks.sum_by_name(totals).items()} if tokens else {}
    if GAP in numbers:
        numbers["mismatch/logp_gap_max"] = max_over_ranks(largest_gap)
    return numbers, fault, tokens


class Found:
    """What micro-batches had, on the device until all are through: reading it would let a GPU wait for the next one.

    Args:
        device: of the models.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}  # of metrics over trained tokens, float64
        self._gaps: list[Tensor] = []  # the largest of each micro-batch
        self._faults: list[tuple[Tensor, Callable[[], str]]] = []  # whether there is one, and its name

    def losses(self, metrics: dict[str, Tensor], micro: Rollout) -> None:
        """Add up metrics [B, A] of a micro-batch, and keep where its losses are not finite."""
        mask = micro.trained_mask
        for name, x in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + masked_sum(x.detach().double(), mask)
        if GAP in metrics and len(micro):
            self._gaps.append(torch.where(mask, metrics[GAP].detach(), 0.0).max())
        fault = LossFault({name: metrics[name] for name in LOSSES if name in metrics}, micro)
        self._faults.append((fault.there, fault.__str__))

    def gradient(self, finite: Tensor, number: int, micro: Rollout) -> None:
        """Keep whether the gradient was finite after the micro-batch of this number."""
        sentence = f"the gradient of micro-batch {number} is not finite"
        self._faults.append((~finite, lambda: f"{sentence} ({named(micro.turns)})"))

    def read(self) -> tuple[dict[str, float], float, str]:
        """Return sums by name, the largest gap, and the first fault, empty if there is none."""
        scalars = [*self._sums.values(), *self._gaps, *(there for there, _ in self._faults)]
        numbers = torch.stack([x.to(self._device, torch.float64) for x in scalars]).tolist() if scalars else []
        behind_sums, behind_gaps = len(self._sums), len(self._sums) + len(self._gaps)
        largest = 0.0
        for gap in numbers[behind_sums:behind_gaps]:
            largest = max(largest, gap)  # leaves out what is not a number
        faults = zip(self._faults, numbers[behind_gaps:], strict=True)
        fault = next((name() for (_, name), there in faults if there), "")
        return dict(zip(self._sums, numbers[:behind_sums], strict=True)), largest, fault


def micro_batch_losses(
    models: Models, micro: Rollout, packed: Packed, losses: Losses, temperature: float
) -> Iterator[tuple[tuple[Tensor | None, Tensor | None], dict[str, Tensor]]]:
    """Yield losses of policy and values, and metrics, per action token [B, A].

    Those of the actor with a shared critic come first, then those of a separate critic. The graph of the first is
    freed before the second is built.
    """
    mask, critic, shared = micro.action_mask, models.critic, models.shared_critic
    if losses.policy is not None:
        metrics: dict[str, Tensor] = {}
        hidden = models.actor.hidden(packed)
        token = models.actor.token_scores(hidden, packed.targets, temperature)
        scores = CurrentScores(to_columns(token.logps, mask), to_columns(token.entropy, mask))
        if micro.scores.old_logps is None:
            micro = micro.union(scores=Scores(scores.logps.detach(), entropy=scores.entropy.detach()))
            metrics = {GAP: (scores.logps - micro.rollout_logps).abs()}
        loss = losses.policy(micro, scores)
        metrics = {**metrics, "policy/loss": loss, **losses.metrics(micro, scores)}
        value_loss = None
        if shared is not None:
            value_loss = losses.values(micro, _shared_values(shared, packed, hidden, micro))
            metrics = {**metrics, "critic/loss": value_loss}
        yield (loss, value_loss), metrics
    elif shared is not None:
        with torch.no_grad():
            hidden = models.actor.hidden(packed)
        value_loss = losses.values(micro, _shared_values(shared, packed, hidden, micro))
        yield (None, value_loss), {"critic/loss": value_loss}
    if critic is not None and shared is None:
        value_loss = losses.values(micro, to_columns(values_of(critic, packed, None), mask))
        yield (None, value_loss), {"critic/loss": value_loss}


def _shared_values(critic: Critic, packed: Packed, hidden_RH: Tensor, micro: Rollout) -> Tensor:
    """Return the values [B, A] of a critic that reads the actor's states, and let one that is fitted take them in."""
    mask = micro.action_mask
    if critic.fitted:
        assert micro.returns is not None
        begins = first_tokens(mask, micro.turn_ids) & micro.trained_mask
        critic.take_in(hidden_RH.detach()[begins[mask]], micro.returns[begins])
    return of_turns(critic, to_columns(values_of(critic, packed, hidden_RH), mask), micro)
