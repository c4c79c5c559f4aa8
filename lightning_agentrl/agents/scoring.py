"""Scoring of a rollout before training: log-probs, entropies and values at its action tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch import Tensor

from lightning_agentrl.agents.models import Models
from lightning_agentrl.agents.sharding import in_lockstep
from lightning_agentrl.distributed import all_gather, max_over_ranks
from lightning_agentrl.engines import PolicyHandle
from lightning_agentrl.losses import of_first_tokens
from lightning_agentrl.models.critic import Critic, values_of
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.packing import Packed, pack, plan_micro_batches
from lightning_agentrl.models.sequence import SequenceGroup, pack_shard
from lightning_agentrl.models.vision import FamilyReader
from lightning_agentrl.types import ForkPlan, ModelInput, Rollout, Row, Scores, input_of
from lightning_agentrl.types.transfer import to_host, wait_for

TIMES_WITHOUT_GRADIENT = 4
NOTHING = Row(ModelInput.of_ids((0,)), (0,))  # placeholder row of an empty micro-batch


@dataclass(frozen=True)
class Needs:
    """Quantities to compute for a rollout before and during its update. ``a | b`` is the union of ``a`` and ``b``.

    Args:
        old_logps: log-probs and entropies of sampled tokens before the update. If an iteration is one optimizer step
            without dropout, and nothing else needs old log-probs, log-probs of the step itself are used instead.
        ref_logps: log-probs under the reference: the frozen initial policy, or another model such as a teacher.
        values: values at sampled tokens, and of the states at which the rollout is cut.
        sum_pi_squared: sum of squared probabilities over the vocabulary, at each sampled token.
        mini_batch_logps: current log-probs of a whole mini-batch before its first micro-batch.
        greedy_baseline: one greedy episode from each start state.
        forks: continuations from states of the rollout; None: no continuations.
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
        """Whether a forward pass of the policy is needed before the update."""
        return self.old_logps or self.sum_pi_squared or self.mini_batch_logps


@contextmanager
def naming_missing(scores: Scores) -> Iterator[None]:
    """Add the names of scores that were not computed to errors raised inside this context."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        missing = [f.name for f in fields(scores) if getattr(scores, f.name) is None]
        error.add_note(f"scores that were not computed: {', '.join(missing)}; declare in `needs` what is read")
        raise


@dataclass(frozen=True)
class Reader:
    """Settings of the forward passes of a run, and packing of rows into micro-batches.

    Args:
        temperature: sampling temperature.
        max_tokens: largest number of tokens in a micro-batch.
        device: device of the models.
        share: whether to compute common prefixes of a micro-batch's rows once.
        advance: function called with the number of rows processed, for the progress display.
        agree: function that returns the largest number of micro-batches over all ranks. ``agree`` is set if models are
            sharded: ranks with fewer micro-batches add empty ones, since each pass needs all ranks.
        images: image reader of the models; None: the models read text only.
        trains_tower: whether to add a blank image to each pass with gradients that has no image, so that the vision
            tower gets gradients on all ranks.
        precision: function that returns a context with the trainer's precision.
        group: ranks that read their rows together, each a shard of the tokens; None: each rank reads its own rows.
    """

    temperature: float
    max_tokens: int
    device: torch.device
    share: bool
    advance: Callable[[int], None] = lambda count: None
    agree: Callable[[int], int] | None = None
    images: FamilyReader | None = None
    trains_tower: bool = False
    precision: Callable[[], AbstractContextManager[None]] = nullcontext
    group: SequenceGroup | None = None

    def packs(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Packed]]:
        """Yield the row indices and packed inputs of each micro-batch.

        With a group, the rows of all its ranks are packed together, and indices refer to this rank's rows. All ranks of
        a group must call this method, even without rows.
        """
        if self.group is None:
            for index in self.micro_batches(rows):
                yield index, self.pack([rows[i] for i in index])
            return
        parts, rank = all_gather([*rows], self.group.handle), self.group.rank
        every = [row for part in parts for row in part]
        owners = [owner for owner, part in enumerate(parts) for _ in part]
        before = owners.index(rank) if rows else 0
        for index in self.micro_batches(every):
            own = [i - before for i in index if owners[i] == rank]
            yield own, self.pack([every[i] for i in index], [owners[i] for i in index])

    def micro_batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the row indices of each micro-batch; with a group, ``rows`` must be those of all its ranks.

        Without gradients micro-batches are larger, since no activations are kept.
        """
        factor = (1 if torch.is_grad_enabled() else TIMES_WITHOUT_GRADIENT) * (self.group.size if self.group else 1)
        per_token = self.images.patches_per_token if self.images else 0
        plans = plan_micro_batches(rows, factor * self.max_tokens, self.share, per_token)
        return plans if self.agree is None else plans + [[]] * (self.agree(len(plans)) - len(plans))

    def pack(self, rows: Sequence[Row], owners: Sequence[int] = ()) -> Packed:
        """Pack the rows of a micro-batch; with a group, ``owners`` has the rank of each row."""
        feed_tower = self.trains_tower and torch.is_grad_enabled()
        if self.group is not None:
            return pack_shard(rows or [NOTHING], owners or [-1], self.group, self.device, self.images, feed_tower)
        return pack(rows or [NOTHING], self.device, self.share, self.images, feed_tower)


@contextmanager
def cached_precision(plugin: Precision) -> Iterator[None]:
    """Use the trainer's precision; under autocast, cast weights once instead of in each forward pass."""
    if isinstance(plugin, HalfPrecision | DoublePrecision):
        # Weights have the right dtype, and the contexts of these plugins would set the default dtype of all threads.
        yield
        return
    with plugin.forward_context():
        torch.set_autocast_cache_enabled(True)  # Lightning disables this cache; autocast restores the setting on exit
        yield


def _advance_or_leave(agent: Any, rows: int) -> None:
    agent.clock.advance(rows)
    agent.datamodule.stopping.look()


@contextmanager
def evaluation_mode(agent: Any) -> Iterator[None]:
    """Use an agent's models in eval mode, without gradients and in the trainer's precision."""
    agent.eval()
    try:
        with torch.no_grad(), agent.reader.precision():
            yield
    finally:
        agent.train()
        if agent.device_mesh is not None:
            agent.models.release()


def policy_handle(agent: Any) -> PolicyHandle:
    """Return the handle of an agent's policy for an engine."""
    data = agent.datamodule
    return PolicyHandle(
        agent.actor,
        data.player.renderer.stop_token_ids,
        agent.reader.precision,
        max_model_len=data.longest_turn,
        trained_meanwhile=data.max_staleness > 0,
        decode=partial(agent.tokenizer.decode, skip_special_tokens=True),
    )


def reader_for(agent: Any) -> Reader:
    """Return the reader of an agent whose run has started."""
    strategy = agent.trainer.strategy
    lockstep = in_lockstep(strategy)
    alone = not lockstep and agent.sequence_group is None  # whether this rank may leave a pass separately
    return Reader(
        agent.temperature,
        agent.compute.max_tokens_per_micro_batch,
        agent.device,
        agent.models.share_prefixes,
        partial(_advance_or_leave, agent) if alone else agent.clock.advance,
        agree=max_over_ranks if lockstep else None,
        images=agent.actor.image_reader,
        trains_tower=agent.train_tower,
        precision=partial(cached_precision, agent.trainer.precision_plugin),
        group=agent.sequence_group,
    )


@dataclass(frozen=True)
class _Passes:
    """Forward passes over a rollout before training on it."""

    policy: bool
    values_with_policy: bool  # whether the policy's pass also computes values, since the critic shares its trunk
    reference: bool
    values: bool

    @classmethod
    def of(cls, models: Models, rollout: Rollout, needs: Needs) -> _Passes:
        """Return the passes for quantities that are needed and missing."""
        shared = needs.values and models.critic is not None and models.critic.shares_trunk
        policy = (needs.policy_pass or shared) and rollout.scores.old_logps is None
        return cls(
            policy=policy,
            values_with_policy=policy and shared,
            reference=needs.ref_logps and models.reference is not None and rollout.scores.ref_logps is None,
            values=needs.values and models.critic is not None and not (policy and shared),
        )


def needs_before_update(agent: Any) -> Needs:
    """Return the agent's needs, plus old log-probs if an iteration has several steps or dropout."""
    drops = agent.lora is not None and agent.lora.dropout > 0
    several = drops or agent.datamodule.steps_per_iteration > 1
    # Whether the engine's log-probs are used as old log-probs.
    bypass = agent.correction is not None and agent.correction.bypass
    return agent.needs | Needs(old_logps=several and not bypass)


@contextmanager
def scoring(agent: Any, rollout: Rollout) -> Iterator[None]:
    """Context for scoring a rollout: eval mode, timed as stage ``score``; all ranks leave it together."""
    total = rows_to_score(agent.models, rollout, needs_before_update(agent))
    with agent.datamodule.stopping.together(), agent.clock.stage("score", total), evaluation_mode(agent):
        yield
    agent.clock.count("score", turns=len(rollout.turns), tokens=rollout.tokens)


def score_rollout(models: Models, rollout: Rollout, needs: Needs, reader: Reader) -> Rollout:
    """Add the needed scores: log-probs of actor and reference, entropies, values and bootstrap values.

    Existing log-probs are kept, since they belong to the policy before the update. Values are always computed with the
    current critic, in the same pass as the actor if it shares the actor's trunk.
    """
    passes, bootstrap_values = _Passes.of(models, rollout, needs), None
    if passes.policy:
        shared = models.critic if passes.values_with_policy else None
        scores, bootstrap_values = score_policy(models.actor, rollout, reader, shared, needs.sum_pi_squared)
        rollout = rollout.union(scores=scores)
    if passes.reference:
        assert models.reference is not None
        shares = reader.share and models.reference.shares_prefixes
        scores, _ = score_policy(models.reference, rollout, replace(reader, share=shares))
        rollout = rollout.union(scores=Scores(ref_logps=scores.old_logps))
    if passes.values:
        assert models.critic is not None
        values, bootstrap_values = score_values(models.actor, models.critic, rollout, reader)
        rollout = rollout.union(scores=Scores(values=values))
    if bootstrap_values is not None:
        rollout = rollout.union(bootstrap_values=bootstrap_values)
    return rollout


def rows_to_score(models: Models, rollout: Rollout, needs: Needs) -> int:
    """Return the total number of rows in all passes of :func:`score_rollout`."""
    passes = _Passes.of(models, rollout, needs)
    ends = len(bootstrap_rows(rollout)) if passes.values or passes.values_with_policy else 0
    return (passes.policy + passes.reference + passes.values) * len(rollout) + ends


def action_rows(rollout: Rollout) -> list[Row]:
    """Return one row per sample, with logit positions before each of its action tokens."""
    return [sample.row for sample in rollout.samples]


def bootstrap_rows(rollout: Rollout) -> dict[int, Row]:
    """Return rows of the states that follow cut samples, by sample index, with the last token as logit position."""
    rows = {}
    for i in torch.nonzero(rollout.last_of_episode).flatten().tolist():
        following = rollout.samples[i].turns[-1].bootstrap
        if following is not None:
            state = input_of(following)
            rows[i] = Row(state, (len(state) - 1,))
    return rows


def to_columns(flat_R: Tensor, mask_BA: Tensor) -> Tensor:
    """Arrange numbers [R] at logit positions as [B, A]: each at its action token, 0 elsewhere."""
    columns = flat_R.new_zeros(mask_BA.shape)
    return columns.masked_scatter(mask_BA.to(flat_R.device), flat_R)


@torch.no_grad()
def score_policy(
    policy: LanguageModel,
    rollout: Rollout,
    reader: Reader,
    shared: Critic | None = None,
    sum_pi_squared: bool = False,
) -> tuple[Scores, Tensor | None]:
    """Return the scores [B, A] of a policy at action tokens, and bootstrap values [B].

    Args:
        policy: the model.
        rollout: rollout to score.
        reader: settings of the forward passes.
        shared: critic that shares the policy's trunk, to compute values in the same pass; None: no values.
        sum_pi_squared: whether to compute sums of squared probabilities.

    Returns:
        Log-probs and entropies (nats) with the other requested scores; and bootstrap values, None without ``shared``.
    """

    def read(packed: Packed) -> list[Tensor]:
        hidden = policy.hidden(packed)
        scores = policy.token_scores(hidden, packed.targets, reader.temperature, sum_pi_squared)
        values = None if shared is None else values_of(shared, packed, hidden)
        return [x for x in (scores.logps, scores.entropy, scores.sum_pi_squared, values) if x is not None]

    names = ["old_logps", "entropy", *["sum_pi_squared"] * sum_pi_squared]
    if shared is None:
        columns, _ = _score_rows(rollout, {}, reader, read, names)
        return Scores(**columns), None
    columns, bootstrap_values = _score_rows(rollout, bootstrap_rows(rollout), reader, read, [*names, "values"])
    columns["values"] = of_turns(shared, columns["values"], rollout)
    return Scores(**columns), bootstrap_values


@torch.no_grad()
def row_scores(policy: LanguageModel, rows: Sequence[Row], reader: Reader) -> list[tuple[Tensor, ...]]:
    """Return, for each row, log-probs [R] of the tokens after its logit positions and entropies [R], on the CPU."""

    def read(packed: Packed) -> list[Tensor]:
        scores = policy.token_scores(policy.hidden(packed), packed.targets, reader.temperature)
        return [scores.logps, scores.entropy]

    sizes = [len(row.logit_positions) for row in rows]
    return list(zip(*(flat.split(sizes) for flat in _read_rows(rows, reader, read)), strict=True))


@torch.no_grad()
def row_distributions(policy: LanguageModel, rows: Sequence[Row], reader: Reader) -> Tensor:
    """Return log-probs of the whole vocabulary at the logit positions of at least one row, [R, V], on the CPU."""

    def read(packed: Packed) -> list[Tensor]:
        return [policy.distributions(policy.hidden(packed), reader.temperature).cpu()]  # too large to keep on the GPU

    (log_pi_RV,) = _read_rows(rows, reader, read)
    return log_pi_RV


@torch.no_grad()
def row_states(policy: LanguageModel, rows: Sequence[Row], reader: Reader) -> Tensor:
    """Return the last hidden states at the logit positions of at least one row, [R, H], on the CPU."""

    def read(packed: Packed) -> list[Tensor]:
        return [policy.hidden(packed).float()]

    (states_RH,) = _read_rows(rows, reader, read)
    return states_RH


@torch.no_grad()
def score_values(policy: LanguageModel, critic: Critic, rollout: Rollout, reader: Reader) -> tuple[Tensor, Tensor]:
    """Return values [B, A] at action tokens, and bootstrap values [B] of the states after cut samples, 0 for others."""

    def read(packed: Packed) -> list[Tensor]:
        return [values_of(critic, packed, policy.hidden(packed) if critic.shares_trunk else None)]

    columns, bootstrap_values = _score_rows(rollout, bootstrap_rows(rollout), reader, read, ["values"])
    return of_turns(critic, columns["values"], rollout), bootstrap_values


def of_turns(critic: Critic, values_BA: Tensor, rollout: Rollout) -> Tensor:
    """Return values [B, A] of action tokens; with a fitted critic, all tokens of a turn get its first token's value."""
    return of_first_tokens(values_BA, rollout.action_mask, rollout.turn_ids) if critic.fitted else values_BA


def _score_rows(
    rollout: Rollout,
    ends: Mapping[int, Row],
    reader: Reader,
    read: Callable[[Packed], list[Tensor]],
    names: Sequence[str],
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute scores at the action tokens of a rollout and in the states after some of its samples.

    Args:
        rollout: rollout to score.
        ends: rows of the states after samples, by sample index.
        reader: settings of the forward passes.
        read: function that returns a tensor [R] for each score.
        names: names of the scores.

    Returns:
        Scores [B, A] by name, and the last score [B] in the states after samples.
    """
    mask = rollout.action_mask
    columns = dict.fromkeys(names, torch.zeros(mask.shape))
    after_B = torch.zeros(len(rollout))
    # Without rows, as on a rank that lost all its groups, `_read_rows` returns nothing.
    for name, flat_R in zip(names, _read_rows([*action_rows(rollout), *ends.values()], reader, read), strict=False):
        columns[name] = to_columns(flat_R, mask)  # scores of action tokens come first
        after_B = flat_R.new_zeros(len(rollout))
        after_B[torch.tensor([*ends], dtype=torch.int64)] = flat_R[len(flat_R) - len(ends) :]
    return columns, after_B


def _read_rows(rows: Sequence[Row], reader: Reader, read: Callable[[Packed], list[Tensor]]) -> list[Tensor]:
    """Return each score at the R logit positions of all rows, in their order: [R, …], on the CPU.

    Without rows the list is empty.
    """
    kinds_of_row: list[list[Tensor]] = [[] for _ in rows]
    for index, packed in reader.packs(rows):
        flats = read(packed)
        sizes = [len(rows[i].logit_positions) for i in index]
        for flat in flats if index else ():
            for i, part in zip(index, to_host(flat).split(sizes), strict=True):
                kinds_of_row[i].append(part)
        reader.advance(len(index))
    wait_for(reader.device)
    return [torch.cat(parts) for parts in zip(*kinds_of_row, strict=True)]
