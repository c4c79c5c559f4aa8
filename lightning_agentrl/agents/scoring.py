"""Scores of a rollout before training on it: models read its action tokens, micro-batch by micro-batch."""

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
NOTHING = Row(ModelInput.of_ids((0,)), (0,))  # what an empty micro-batch reads


@dataclass(frozen=True)
class Needs:
    """Quantities to compute for a rollout before and during its update. ``a | b`` is the union of both.

    Args:
        old_logps: log-probs and entropy of the sampled tokens before the update. If an iteration is one optimizer step
            without dropout and nothing needs them earlier, those of the step itself are used, without a separate pass.
        ref_logps: log-probs under the reference: the frozen initial policy, or another model such as a teacher.
        values: values of the sampled tokens, and of the states at which the rollout is cut.
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
    """Add to an error in code that reads scores the names of the scores that were not computed."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        missing = [f.name for f in fields(scores) if getattr(scores, f.name) is None]
        error.add_note(f"scores that were not computed: {', '.join(missing)}; declare in `needs` what is read")
        raise


@dataclass(frozen=True)
class Reader:
    """Settings of the forward passes of a run.

    Args:
        temperature: of sampling.
        max_tokens: of one micro-batch.
        device: of the models.
        share: compute a prefix that several rows of a micro-batch share once.
        advance: called with the number of processed rows.
        agree: if models are sharded, returns the largest count of micro-batches of all ranks. A rank with fewer adds
            empty ones, since every rank has to take part in each forward and backward pass.
        images: how the models read images; None: they read text only.
        trains_tower: read a blank image in each pass with gradients that has no image, so that the weights of the
            tower have gradients on all ranks.
        precision: context of the trainer's precision.
        group: ranks that read their rows together, each a shard of the tokens; None: each rank reads its own.
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
        """Yield for each micro-batch the numbers of its rows and what is read for them; a group reads all of its rows.

        All ranks of a group must call it, also without rows.
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
        """Return the numbers of the rows of each micro-batch; of a group, ``rows`` are those of all its ranks.

        Without gradients no activations are kept, so several times as many tokens fit, and more prefixes are shared.
        """
        factor = (1 if torch.is_grad_enabled() else TIMES_WITHOUT_GRADIENT) * (self.group.size if self.group else 1)
        per_token = self.images.patches_per_token if self.images else 0
        plans = plan_micro_batches(rows, factor * self.max_tokens, self.share, per_token)
        return plans if self.agree is None else plans + [[]] * (self.agree(len(plans)) - len(plans))

    def pack(self, rows: Sequence[Row], owners: Sequence[int] = ()) -> Packed:
        """Pack a micro-batch; of a group, with the rank that has each row."""
        feed_tower = self.trains_tower and torch.is_grad_enabled()
        if self.group is not None:
            return pack_shard(rows or [NOTHING], owners or [-1], self.group, self.device, self.images, feed_tower)
        return pack(rows or [NOTHING], self.device, self.share, self.images, feed_tower)


@contextmanager
def cached_precision(plugin: Precision) -> Iterator[None]:
    """Use the trainer's precision; under autocast, cast weights once and not in each forward pass."""
    if isinstance(plugin, HalfPrecision | DoublePrecision):
        yield  # weights have the dtype already; the contexts of these plugins set the default dtype of all threads
        return
    with plugin.forward_context():
        torch.set_autocast_cache_enabled(True)  # Lightning turns it off; autocast restores it on leaving
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
    """Return what an engine needs of an agent's policy."""
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
    """Return the settings of the forward passes of an agent whose run has started."""
    strategy = agent.trainer.strategy
    lockstep = in_lockstep(strategy)
    alone = not lockstep and agent.sequence_group is None  # else no rank may leave by itself
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
    """Models that read a rollout before training on it, each in a separate pass."""

    policy: bool
    values_with_policy: bool  # by a critic that shares the policy's trunk
    reference: bool
    values: bool

    @classmethod
    def of(cls, models: Models, rollout: Rollout, needs: Needs) -> _Passes:
        """Return those for what is needed and not there yet."""
        shared = needs.values and models.critic is not None and models.critic.shares_trunk
        policy = (needs.policy_pass or shared) and rollout.scores.old_logps is None
        return cls(
            policy=policy,
            values_with_policy=policy and shared,
            reference=needs.ref_logps and models.reference is not None and rollout.scores.ref_logps is None,
            values=needs.values and models.critic is not None and not (policy and shared),
        )


def needs_before_update(agent: Any) -> Needs:
    """Return what an agent declares; several steps per iteration, or dropout in one, also need the log-probs before."""
    drops = agent.lora is not None and agent.lora.dropout > 0
    several = drops or agent.datamodule.steps_per_iteration > 1
    bypass = agent.correction is not None and agent.correction.bypass  # then the engine's log-probs are the old ones
    return agent.needs | Needs(old_logps=several and not bypass)


@contextmanager
def scoring(agent: Any, rollout: Rollout) -> Iterator[None]:
    """Time what scores a rollout as a stage, in eval mode; all ranks leave it together."""
    total = rows_to_score(agent.models, rollout, needs_before_update(agent))
    with agent.datamodule.stopping.together(), agent.clock.stage("score", total), evaluation_mode(agent):
        yield
    agent.clock.count("score", turns=len(rollout.turns), tokens=rollout.tokens)


def score_rollout(models: Models, rollout: Rollout, needs: Needs, reader: Reader) -> Rollout:
    """Add what is needed of log-probs of actor and reference, entropy, values and bootstrap values.

    Log-probs already there are kept, since the policy that sampled does not change; values are always those
    of the current critic. A critic that shares the actor's trunk is read in the same pass.
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
    """Return how many rows all passes of :func:`score_rollout` read together."""
    passes = _Passes.of(models, rollout, needs)
    ends = len(bootstrap_rows(rollout)) if passes.values or passes.values_with_policy else 0
    return (passes.policy + passes.reference + passes.values) * len(rollout) + ends


def action_rows(rollout: Rollout) -> list[Row]:
    """Return one row per sample, read before each of its action tokens."""
    return [sample.row for sample in rollout.samples]


def bootstrap_rows(rollout: Rollout) -> dict[int, Row]:
    """Return rows of the states after samples where the recursion is cut, read at their last token, by sample."""
    rows = {}
    for i in torch.nonzero(rollout.last_of_episode).flatten().tolist():
        following = rollout.samples[i].turns[-1].bootstrap
        if following is not None:
            state = input_of(following)
            rows[i] = Row(state, (len(state) - 1,))
    return rows


def to_columns(flat_R: Tensor, mask_BA: Tensor) -> Tensor:
    """Return [B, A] with the numbers of the R logit positions at the action tokens, and 0 elsewhere."""
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
    """Return log-probs and entropies (nats) of action tokens [B, A], and sums of squared probabilities if asked for.

    With a critic that shares the trunk also values [B, A] and bootstrap values [B], from the same pass.
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
    """Return log-probs [R] of the tokens after the logit positions of each row and entropies [R] there, on the CPU."""

    def read(packed: Packed) -> list[Tensor]:
        scores = policy.token_scores(policy.hidden(packed), packed.targets, reader.temperature)
        return [scores.logps, scores.entropy]

    sizes = [len(row.logit_positions) for row in rows]
    return list(zip(*(flat.split(sizes) for flat in _read_rows(rows, reader, read)), strict=True))


@torch.no_grad()
def row_distributions(policy: LanguageModel, rows: Sequence[Row], reader: Reader) -> Tensor:
    """Return log-probs of the whole vocabulary at the logit positions of at least one row, [R, V], on the CPU."""

    def read(packed: Packed) -> list[Tensor]:
        return [policy.distributions(policy.hidden(packed), reader.temperature).cpu()]  # too large to wait there

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
    """Return values [B, A] of action tokens, and bootstrap values [B] of the states after samples, 0 without a cut."""

    def read(packed: Packed) -> list[Tensor]:
        return [values_of(critic, packed, policy.hidden(packed) if critic.shares_trunk else None)]

    columns, bootstrap_values = _score_rows(rollout, bootstrap_rows(rollout), reader, read, ["values"])
    return of_turns(critic, columns["values"], rollout), bootstrap_values


def of_turns(critic: Critic, values_BA: Tensor, rollout: Rollout) -> Tensor:
    """Return the values of action tokens [B, A]: where a critic is fitted, those of the beginnings of their turns."""
    return of_first_tokens(values_BA, rollout.action_mask, rollout.turn_ids) if critic.fitted else values_BA


def _score_rows(
    rollout: Rollout,
    ends: Mapping[int, Row],
    reader: Reader,
    read: Callable[[Packed], list[Tensor]],
    names: Sequence[str],
) -> tuple[dict[str, Tensor], Tensor]:
    """Read a rollout and the states after some of its samples.

    Args:
        rollout: as it was collected.
        ends: rows of these states, by sample.
        reader: settings of the passes.
        read: gives a tensor [R] for each kind of number.
        names: of the kinds.

    Returns:
        A tensor [B, A] for each kind by name, and the numbers of the last kind [B] in the states after samples.
    """
    mask = rollout.action_mask
    columns = dict.fromkeys(names, torch.zeros(mask.shape))
    after_B = torch.zeros(len(rollout))
    # Without a row, as on a rank whose groups are lost, there is no kind.
    for name, flat_R in zip(names, _read_rows([*action_rows(rollout), *ends.values()], reader, read), strict=False):
        columns[name] = to_columns(flat_R, mask)  # numbers of action tokens come first
        after_B = flat_R.new_zeros(len(rollout))
        after_B[torch.tensor([*ends], dtype=torch.int64)] = flat_R[len(flat_R) - len(ends) :]
    return columns, after_B


def _read_rows(rows: Sequence[Row], reader: Reader, read: Callable[[Packed], list[Tensor]]) -> list[Tensor]:
    """Return for each kind of number those at the R logit positions of all rows, in their order: [R, …], on the CPU.

    Without a row there is no kind.
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
