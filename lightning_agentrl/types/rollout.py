"""The rollout batch: ragged samples, and padded tensors over their action tokens.

Suffixes: B samples, A action tokens (padded to the longest sample). Tokens between two actions of a sample
(observations, template tokens) are not on the A axis, so estimators and losses cannot use these tokens by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_agentrl.types.rounding import HALF_STEP
from lightning_agentrl.types.transfer import to_device
from lightning_agentrl.types.turn import Sample, Turn

PER_ROW = (
    "episode",
    "terminated",
    "bootstrap_values",
    "groups",
    "greedy_scores",
    "forked_end_values",
)  # fields of a rollout with shape [B]
FROM_SAMPLES = ("samples", "action_mask", "turn_ids", "rewards", "rollout_logps", "episode", "terminated")
EPISODES_PER_ENV = 2**32  # largest number of episodes per environment, for episode labels


@dataclass(frozen=True)
class Scores:
    """Outputs of the models at the sampled tokens. Each is [B, A], 0 off the action mask; None means not computed."""

    old_logps: Tensor | None = None  # log-probs of the actor at the start of the update
    ref_logps: Tensor | None = None  # log-probs of the frozen reference
    values: Tensor | None = None  # the critic's values of the states before the tokens
    entropy: Tensor | None = None  # entropies of the actor's distributions
    sum_pi_squared: Tensor | None = None  # sums of squared probabilities over the vocabulary

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Computed scores by name."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}


SCORES = frozenset(f.name for f in fields(Scores))


@dataclass(frozen=True)
class Rollout:
    """Samples, and tensors over their action tokens.

    Create a rollout with :meth:`from_samples`; add scores, shaped rewards and advantages with :meth:`union`.
    """

    samples: tuple[Sample, ...]
    action_mask: Tensor  # [B, A] bool
    turn_ids: Tensor  # [B, A] int64, index of the turn within its episode, -1 off the mask
    rewards: Tensor  # [B, A] float32, reward of a turn at its last action token
    rollout_logps: Tensor  # [B, A] float32, log-probs under the engine that sampled
    episode: Tensor  # [B] int64, episode label, equal for samples of one episode
    terminated: Tensor  # [B] bool, whether the episode ended after this sample, without a next state
    scores: Scores = Scores()
    bootstrap_values: Tensor | None = None  # [B] value of the state after the sample, 0 if the sample is not cut
    groups: Tensor | None = None  # [B] int64 label; in a group, task, start state and (in games) side are the same
    greedy_scores: Tensor | None = None  # [B] sum of rewards of the greedy episode from the same start state
    # [B, A] at the first token of a turn, value by forks of the state before the turn; NaN elsewhere.
    state_values: Tensor | None = None
    # [B] value by forks of the state after the sample, 0 if the sample is not cut.
    forked_end_values: Tensor | None = None
    shaped_rewards: Tensor | None = None  # [B, A] rewards after ``shape_rewards``
    advantages: Tensor | None = None  # [B, A]
    returns: Tensor | None = None  # [B, A]
    weights: Tensor | None = None  # [B, A] weights of the policy loss, such as importance weights (trainer over engine)
    loss_mask: Tensor | None = None  # [B, A] bool, action tokens to train on; None: all action tokens
    picked: Tensor | None = None  # [B, A] bool, tokens that the policy loss treats differently, chosen per mini-batch

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Rollout:
        turn_ids: list[int] = []
        rewards: list[float] = []
        logps: list[float] = []
        lengths: list[int] = []
        for sample in samples:
            before = len(logps)
            for action, turn in zip(sample.actions, sample.turns, strict=True):
                logps += action.logps
                turn_ids += [turn.index] * len(action.logps)
                rewards += [*[0.0] * (len(action.logps) - 1), turn.reward]
            lengths.append(len(logps) - before)
        mask = torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.int64)[:, None]

        def spread(flat: Sequence[float], fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full(mask.shape, fill, dtype=dtype).masked_scatter_(mask, torch.tensor(flat, dtype=dtype))

        lasts = [sample.turns[-1] for sample in samples]
        groups = [t.group for t in lasts if t.group is not None]
        return cls(
            samples=tuple(samples),
            action_mask=mask,
            turn_ids=spread(turn_ids, -1, torch.int64),
            rewards=spread(rewards, 0.0, torch.float32),
            rollout_logps=spread(logps, 0.0, torch.float32),
            episode=torch.tensor([t.env * EPISODES_PER_ENV + t.episode for t in lasts], dtype=torch.int64),
            terminated=torch.tensor([t.terminated for t in lasts], dtype=torch.bool),
            groups=torch.tensor(groups, dtype=torch.int64) if len(groups) == len(lasts) else None,
        )

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        return tuple([turn for sample in self.samples for turn in sample.turns])

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all samples, prompts and replies."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def scored(self) -> bool:
        """Whether any score was computed."""
        return bool(self.scores.tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All existing tensors by name, including those in ``scores``."""
        own = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return own | self.scores.tensors

    @property
    def trained_mask(self) -> Tensor:
        """Mask [B, A] of the action tokens that count in losses and denominators."""
        return self.action_mask if self.loss_mask is None else self.loss_mask

    @property
    def outcomes(self) -> Tensor:
        """Sum of rewards [B] of each sample's episode, over the samples of the episode in this rollout."""
        return self._over_episodes(self.rewards.double().sum(1))

    @property
    def outcome_rounding(self) -> Tensor:
        """Largest rounding error [B] of ``outcomes`` in float32, also for rewards that cancel."""
        return self._over_episodes(HALF_STEP * self.rewards.double().abs().sum(1))

    def _over_episodes(self, x_B: Tensor) -> Tensor:
        labels_N, index_B = self.episode.unique(return_inverse=True)
        return x_B.new_zeros(len(labels_N)).index_add_(0, index_B, x_B)[index_B]

    @cached_property
    def last_of_episode(self) -> Tensor:
        """Mask [B] of the samples that are the last of their episode in this rollout."""
        turns = [sample.turns[-1].index for sample in self.samples]
        order = sorted(zip(self.episode.tolist(), turns, range(len(self)), strict=True))
        last = {episode: i for episode, _, i in order}
        flags = torch.zeros(len(self), dtype=torch.bool)
        flags[list(last.values())] = True
        return flags

    def select(self, index: Sequence[int] | Tensor) -> Rollout:
        """Return some of the rows, without columns that become empty.

        Args:
            index: indices of the rows, in the order of the result, or a mask [B].

        Raises:
            ValueError: the mask has another length than the rollout.
        """
        rows = torch.as_tensor(index, device=self.action_mask.device).reshape(-1)
        if rows.dtype == torch.bool:
            if len(rows) != len(self):
                raise ValueError(f"a mask of {len(rows)} rows does not fit a rollout of {len(self)}")
            rows = rows.nonzero().flatten()
        rows = rows.to(torch.int64)
        samples = tuple(self.samples[i] for i in rows.tolist())
        width = int(self.action_mask[rows].sum(1).max()) if len(rows) else 0
        chosen = {name: x[rows] if x.dim() == 1 else x[rows, :width] for name, x in self.tensors.items()}
        return replace(self.with_tensors(chosen), samples=samples)

    def chunk(self, n: int) -> list[Rollout]:
        """Split the rollout into ``n`` parts of consecutive rows; the first parts may have one more row.

        :meth:`concat` joins the parts again.

        Raises:
            ValueError: there are fewer rows than parts.
        """
        if not 1 <= n <= len(self):
            raise ValueError(f"a rollout of {len(self)} rows cannot be cut into {n} parts")
        return [self.select(rows) for rows in torch.arange(len(self)).tensor_split(n)]

    def fields(self, *names: str) -> Rollout:
        """Return this rollout with only the named tensors, besides the samples and the tensors made from samples.

        Args:
            names: names of existing tensors, including scores, such as ``values`` and ``advantages``.

        Raises:
            ValueError: the rollout has no tensor of a given name.
        """
        if missing := [name for name in names if name not in self.tensors]:
            raise ValueError(f"this rollout has no '{missing[0]}'; it has {', '.join(self.tensors)}")
        return Rollout.from_dict({name: x for name, x in self.to_dict().items() if name in (*FROM_SAMPLES, *names)})

    def to_dict(self) -> dict[str, Any]:
        """Return the samples and all existing tensors, [B] or [B, A], by name; :meth:`from_dict` is the inverse."""
        return {"samples": self.samples, **self.tensors}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Rollout:
        """Create a rollout from the result of :meth:`to_dict`.

        Args:
            given: samples, the tensors made from samples, and any other tensors by name.

        Raises:
            ValueError: the samples or a tensor made from samples is missing, a name is unknown, or a tensor has the
                wrong shape.
        """
        known = {f.name for f in fields(cls)} - {"scores"} | SCORES
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"a rollout has no field '{unknown[0]}'; it has {', '.join(sorted(known))}")
        if missing := [name for name in FROM_SAMPLES if name not in given]:
            raise ValueError(f"a rollout needs '{missing[0]}'; Rollout.from_samples creates it from samples")
        samples, mask = tuple(given["samples"]), given["action_mask"]
        if mask.dim() != 2 or len(mask) != len(samples):
            raise ValueError(f"action_mask has the shape {list(mask.shape)}; {len(samples)} samples need [B, A]")
        made = cls(samples, *(given[name] for name in FROM_SAMPLES[1:]))
        return made.union(**{name: x for name, x in given.items() if name != "samples"})

    @staticmethod
    def concat(rollouts: Sequence[Rollout]) -> Rollout:
        """Join the rows of all rollouts; a field is kept only if every rollout has it."""
        width = max(r.action_mask.shape[1] for r in rollouts)

        def join(tensors: Sequence[Tensor | None], fill: int = 0) -> Tensor | None:
            present = [x for x in tensors if x is not None]
            if len(present) < len(tensors):
                return None
            return torch.cat([x if x.dim() == 1 else pad(x, (0, width - x.shape[1]), value=fill) for x in present])

        merged: dict = {
            f.name: join([getattr(r, f.name) for r in rollouts], -1 if f.name == "turn_ids" else 0)
            for f in fields(Rollout)
            if f.name not in ("samples", "scores")
        }
        scores = Scores(**{f.name: join([getattr(r.scores, f.name) for r in rollouts]) for f in fields(Scores)})
        return Rollout(samples=tuple(s for r in rollouts for s in r.samples), scores=scores, **merged)

    def union(self, **new: Tensor | Scores) -> Rollout:
        """Return this rollout with the given fields added or replaced; scores are merged field by field.

        Raises:
            ValueError: a tensor does not have the shape of its field, [B] or [B, A].
        """
        scores = new.pop("scores", None)
        given = cast(dict[str, Tensor], new)
        if isinstance(scores, Scores):
            given |= scores.tensors
        for name, x in given.items():
            shape = self.action_mask.shape[:1] if name in PER_ROW else self.action_mask.shape
            if x.shape != shape:
                raise ValueError(f"{name} has the shape {list(x.shape)}; this rollout needs {list(shape)}")
        return self.with_tensors(given)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Rollout:
        """Return this rollout with tensors replaced by name, including those in ``scores``."""
        of_scores = {name: x for name, x in tensors.items() if name in SCORES}
        others: dict[str, Any] = {name: x for name, x in tensors.items() if name not in SCORES}
        return replace(self, scores=replace(self.scores, **of_scores), **others)

    def to(self, device: torch.device | str) -> Rollout:
        return self.with_tensors({name: to_device(x, device) for name, x in self.tensors.items()})


Reduce = Callable[[Tensor], Tensor]
"""Function that returns the sum of a tensor over all ranks. All ranks must call this function."""

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Function that returns the tensors of all ranks in rank order; sizes may differ. All ranks must call this function."""


def alone(x: Tensor) -> list[Tensor]:
    """Return ``[x]``: the :data:`Gather` function for a single rank."""
    return [x]


def in_words(returned: object) -> str:
    """Describe a value in an error message: by shape for tensors, by parts for sequences, by class name for others."""
    if isinstance(returned, Tensor):
        return f"a tensor {list(returned.shape)}"
    if isinstance(returned, tuple | list):
        return f"({', '.join(map(in_words, returned))})"
    return type(returned).__name__
