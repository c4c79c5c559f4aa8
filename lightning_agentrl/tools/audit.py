"""Comparison of a run's critic and estimators with values measured by playing on, for `agentrl audit-critic`."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef

from lightning_agentrl import advantages
from lightning_agentrl.advantages import AdvantageEstimator, Forked, compress, estimated
from lightning_agentrl.agents import Agent, Needs
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks.turn_log import turn_records
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.tools.view import Entry, Report, Table
from lightning_agentrl.types import Rollout, Turn
from lightning_agentrl.types.rounding import all_equal


@dataclass(frozen=True)
class Agreement:
    """Agreement of N estimates with N measurements.

    Args:
        squared: mean squared difference.
        bias: mean difference, estimate minus measurement.
        rank: Spearman's rank correlation; NaN where either side is constant.
        explained: share of the variance of the measurements that the estimates explain; NaN without variance.
    """

    squared: float
    bias: float
    rank: float
    explained: float


def agreement(estimates_N: Tensor, measured_N: Tensor) -> Agreement:
    """Compare estimates with measurements; NaN everywhere if there are none."""
    x_N, y_N = estimates_N.double(), measured_N.double()
    if not len(x_N):
        return Agreement(*[math.nan] * 4)
    off_N = x_N - y_N
    same_x, same_y = all_equal(x_N.tolist()), all_equal(y_N.tolist())  # rounding gives equal numbers a variance
    rank = math.nan if same_x or same_y else float(spearman_corrcoef(x_N, y_N))
    explained = math.nan if same_y else 1 - float(off_N.var(correction=0) / y_N.var(correction=0))
    return Agreement(float((off_N**2).mean()), float(off_N.mean()), rank, explained)


def noise_of_means(returns: Sequence[Sequence[float]]) -> float:
    """Return the mean squared error that means of independent returns have by themselves: variance over count.

    Those of fewer than two returns tell nothing; NaN if there are no others.
    """
    each = [float(torch.tensor(one, dtype=torch.float64).var()) / len(one) for one in returns if len(one) > 1]
    return sum(each) / len(each) if each else math.nan


def explained_by_exact_values(returns: Sequence[Sequence[float]], starts: Sequence[int]) -> float:
    """Return the share of the variance of returns that the exact values of their states explain: what a critic can.

    The rest is chance, of the policy and of the environment. States of one start have much in common, and their
    branches share random numbers, so the variance of values is told by pairs of states of different starts: half the
    squared difference of their means, less what it owes to the spread within states. Below 0 if chance alone is seen.

    Args:
        returns: independent ones from each state. States with fewer than two are left out.
        starts: what each state followed from; nothing else is common to two of them.

    Returns:
        The share; NaN with fewer than two starts, or where all returns are equal.
    """
    every = [torch.tensor(one, dtype=torch.float64) for one in returns]
    known = [(one, start) for one, start in zip(every, starts, strict=True) if len(one) > 1]
    if len({start for _, start in known}) < 2 or all_equal(torch.cat([one for one, _ in known]).tolist()):
        return math.nan
    variance_N = torch.stack([one.var() for one, _ in known])
    mean_N = torch.stack([one.mean() for one, _ in known])
    noise_N = variance_N / torch.tensor([len(one) for one, _ in known])
    which_N = torch.tensor([start for _, start in known]).unique(return_inverse=True)[1]
    own_NC = nn.functional.one_hot(which_N).double()
    others_N = len(known) - own_NC.sum(0)[which_N]  # states that each is compared with
    mean_N = mean_N - mean_N.mean()  # sums of squares are more exact
    # Over all pairs of different starts, (m - m')^2 = m^2 + m'^2 - 2 m m', where sums of m' are of all but one's own.
    sums_C = own_NC.T @ mean_N
    squares = 2 * (mean_N**2 * others_N).sum() - 2 * (mean_N.sum() ** 2 - (sums_C**2).sum())
    between = float((squares - 2 * (noise_N * others_N).sum()) / others_N.sum()) / 2
    within = float(variance_N.mean())
    return between / (between + within) if between + within > 0 else math.nan


WORST = 20  # turns shown by themselves
LEAST_RANK = 0.2  # of the critic's values, below which it tells good states from bad ones hardly better than chance


class Audited(Exception):
    """The end of an audit, raised when its rollout was compared."""


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Args:
        forked: advantages by forks.
        values: of the critic against forks, at the states that were forked; None: the run has no critic.
        noise: mean squared error of the forks' values by themselves.
        explainable: share of the variance of returns that exact values would explain.
        credit: advantages of estimators against those of forks, by the estimator's name.
        rollout: with its scores and forks.
        token_discount: of the run's estimator, from token to token of a reply; forks have none.
    """

    forked: Tensor
    values: Agreement | None
    noise: float
    explainable: float
    credit: dict[str, Agreement]
    rollout: Rollout
    token_discount: float = 1.0


class AuditCritic(RolloutCallback):
    """Has the next rollout forked, and compares.

    Args:
        forked: gives the advantages that others are compared with.
    """

    def __init__(self, forked: Forked) -> None:
        self.forked = forked
        self.found: Audit | None = None
        self.records: list[dict[str, Any]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        agent = cast(Agent, pl_module)
        if not agent.datamodule.interaction.forks:
            name = type(agent.datamodule.interaction).__name__
            raise ConfigError(
                f"episodes that {name} plays cannot be played on from a turn, so no value can be measured"
            )
        agent.further_needs = Needs(forks=self.forked.needs_forks)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Play a rollout, even if a critic warm-up would reuse its stored ones."""
        stream = cast(Agent, pl_module).datamodule.stream
        assert stream is not None
        stream.source = None

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.found = audit(rollout, self.forked, agent.advantage)
        self.records = list(turn_records(rollout, agent.tokenizer))
        raise Audited


def audit(rollout: Rollout, forked: Forked, own: AdvantageEstimator) -> Audit:
    """Compare a critic, and all estimators that a rollout has enough for, with its forks.

    Args:
        rollout: scored, with forks.
        forked: what they were made for.
        own: the estimator of the run; others have their defaults.
    """
    assert rollout.state_values is not None
    at_states = rollout.action_mask & ~rollout.state_values.isnan()
    truth_BA, _ = forked.estimate(replace(rollout, shaped_rewards=None))  # branches have no KL in their rewards
    credit = {}
    for name, estimator in _estimators(own):
        try:
            advantages_BA, _ = estimated(estimator, rollout)
        except ValueError:
            if estimator is own:
                raise
            continue  # the rollout lacks what it needs
        summed_BA = up_to_next_value(advantages_BA, rollout, forked.gamma)
        compared = at_states & ~summed_BA.isnan()
        credit[name] = agreement(summed_BA[compared], truth_BA[compared])
    values = None
    if rollout.scores.values is not None:
        values = agreement(rollout.scores.values[at_states], rollout.state_values[at_states])
    returns = [turn.branch_returns for turn in rollout.turns]
    starts = [turn.env if turn.group is None else turn.group for turn in rollout.turns]
    explainable = explained_by_exact_values(returns, starts)
    return Audit(truth_BA, values, noise_of_means(returns), explainable, credit, rollout, own.token_discount)


def up_to_next_value(advantages_BA: Tensor, rollout: Rollout, gamma: float) -> Tensor:
    """Return the sum of the advantages of turns from each turn up to the next one whose state was valued: what forks
    give these turns together, as ``r + gamma V' - V`` of neighbouring turns adds up.

    Args:
        advantages_BA: of an estimator; those of the first tokens count.
        rollout: with forks.
        gamma: discount from turn to turn.

    Returns:
        [B, A] in float64, the same at all tokens of a turn; NaN where no state after the turn was valued.
    """
    assert rollout.state_values is not None and rollout.forked_end_values is not None  # noqa: PT018 - has forks
    layout = compress(rollout.action_mask, rollout.turn_ids, rollout.episode)
    turns = layout.turns(rollout.turn_ids)
    advantages_NJ, values_NJ = (
        turns.at_starts(layout.gather(x_BA.double())) for x_BA in (advantages_BA, rollout.state_values)
    )
    sums_NJ = torch.zeros_like(advantages_NJ)
    rest_N = torch.where(rollout.forked_end_values.isnan(), math.nan, 0.0).double()[layout.last_row_N]
    for j in reversed(range(sums_NJ.shape[1])):
        sums_NJ[:, j] = advantages_NJ[:, j] + gamma * rest_N
        before_N = torch.where(values_NJ[:, j].isnan(), sums_NJ[:, j], 0)
        rest_N = torch.where(turns.mask_NJ[:, j], before_N, rest_N)
    return layout.scatter(turns.spread(sums_NJ))


def _estimators(own: AdvantageEstimator) -> Iterator[tuple[str, AdvantageEstimator]]:
    """Yield the run's estimator, and the others of the package with their defaults, but for what is made of forks."""
    if not isinstance(own, Forked):
        yield f"{type(own).__name__} (of the run)", own
    for name in advantages.__all__:
        kind = getattr(advantages, name)
        estimates = inspect.isclass(kind) and issubclass(kind, AdvantageEstimator) and not inspect.isabstract(kind)
        if estimates and kind not in (Forked, type(own)):
            yield name, kind()


def worst_turns(rollout: Rollout) -> list[tuple[Turn, float, float]]:
    """Return the turns whose values are furthest from what their branches returned: turn, value, measured value."""
    found: list[tuple[Turn, float, float]] = []
    for row, sample in enumerate(rollout.samples):
        for turn, *_, here in sample.placed_turns():
            if turn.branch_returns and rollout.scores.values is not None:
                value = float(rollout.scores.values[row, here.start])
                found.append((turn, value, statistics.fmean(turn.branch_returns)))
    return sorted(found, key=lambda one: -abs(one[1] - one[2]))[:WORST]


def audit_report(found: Audit, title: str, branches: int, every: int = 1) -> Report:
    """Put an audit into words; ``branches`` and ``every`` as :class:`Forked` was given them."""
    rollout = found.rollout
    played = sum(turn.forked_turns for turn in rollout.turns)
    forked = sum(bool(turn.branch_returns) for turn in rollout.turns)
    left = sum(turn.index % every == 0 and not turn.branch_returns for turn in rollout.turns)
    warning = (
        f"{left} more were played before, such as those of groups begun ahead, have a reply that was asked for again, "
        "or could not be repeated"
    )
    how = [
        Entry(
            "states",
            f"{forked} of {len(rollout.turns)} turns, {branches} branch{'es' * (branches > 1)} each",
            warning=warning if left else "",
            brief=True,
        ),
        Entry("turns played for them", f"{played}, {played / max(len(rollout.turns), 1):.1f} for each recorded turn"),
        Entry("squared error of the measured values", _noise(found.noise), brief=True),
        Entry("returns explained by exact values", f"{_known(found.explainable, '.2f')} of their variance", brief=True),
    ]
    if found.token_discount < 1:
        warning = (
            "branches are discounted from turn to turn alone, so what the critic has learnt of a discount within "
            "replies counts as its error below, and as that of the run's estimator"
        )
        how.append(Entry("discount from token to token", f"{found.token_discount:g}", warning=warning, brief=True))
    tables = [Table("Forks", how)]
    if found.values is not None:
        tables.append(Table("Values of the critic", _values(found.values, found.noise)))
    rows = [
        Entry(name, f"rank {_known(one.rank, '.2f')}, squared error {_known(one.squared, '.4g')}", brief=True)
        for name, one in sorted(found.credit.items(), key=lambda item: -_or_zero(item[1].rank))
    ]
    about = "Against the advantages of forks; the squared error counts their scale, the rank correlation does not."
    if every > 1:
        about += " Those of turns without a value are added up, as forks give them one together."
    tables.append(Table("Advantages of estimators", rows, about))
    worst = [
        Entry(f"environment {t.env}, episode {t.episode}, turn {t.index}", f"critic {value:.3g}, forks {measured:.3g}")
        for t, value, measured in worst_turns(rollout)
    ]
    if worst:
        tables.append(Table("Turns with the worst values; their episodes follow", worst))
    return Report(title, tables)


def _values(values: Agreement, noise: float) -> list[Entry]:
    own = math.nan if math.isnan(noise) else max(values.squared - noise, 0.0)
    warning = ""
    if math.isnan(values.squared):
        warning = "no state was valued"
    elif math.isnan(values.explained):
        warning = "all measured values are equal, so there is no order of states that a critic could know"
    elif values.rank < LEAST_RANK or math.isnan(values.rank):
        warning = (
            "its order of states is hardly better than chance: a longer warm-up, or an estimator without a critic "
            "(model.init_args.advantage)"
        )
    return [
        Entry(
            "squared error",
            f"{_known(values.squared, '.4g')}, of which the critic's {_known(own, '.4g')}",
            brief=True,
        ),
        Entry("mean of value minus measured value", _known(values.bias, "+.4g"), brief=True),
        Entry(
            "rank correlation",
            _known(values.rank, ".2f"),
            None if math.isnan(values.rank) else max(values.rank, 0.0),
            warning,
            brief=True,
        ),
        Entry("explained share of the measured values' variance", _known(values.explained, ".2f"), brief=True),
    ]


def _noise(noise: float) -> str:
    if math.isnan(noise):
        return "unknown: one branch has no spread, give more (argument --branches)"
    return f"{noise:.4g}, by their own spread"


def _known(number: float, form: str) -> str:
    """Return a number in a format, or that nothing tells it."""
    return "unknown" if math.isnan(number) else f"{number:{form}}"


def _or_zero(x: float) -> float:
    return 0.0 if math.isnan(x) else x
