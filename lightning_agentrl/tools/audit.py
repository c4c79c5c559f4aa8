"""Comparison of a run's critic and advantage estimators with values measured by forks, for `agentrl audit-critic`."""

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
        rank: Spearman's rank correlation; NaN if either side is constant.
        explained: share of the variance of the measurements that the estimates explain; NaN without variance.
    """

    squared: float
    bias: float
    rank: float
    explained: float


def agreement(estimates_N: Tensor, measured_N: Tensor) -> Agreement:
    """Compare N estimates with N measurements; all results are NaN for N = 0."""
    x_N, y_N = estimates_N.double(), measured_N.double()
    if not len(x_N):
        return Agreement(*[math.nan] * 4)
    off_N = x_N - y_N
    same_x, same_y = all_equal(x_N.tolist()), all_equal(y_N.tolist())  # rounding may give equal values a variance
    rank = math.nan if same_x or same_y else float(spearman_corrcoef(x_N, y_N))
    explained = math.nan if same_y else 1 - float(off_N.var(correction=0) / y_N.var(correction=0))
    return Agreement(float((off_N**2).mean()), float(off_N.mean()), rank, explained)


def noise_of_means(returns: Sequence[Sequence[float]]) -> float:
    """Return the mean squared error of means of independent returns: variance divided by count, averaged over states.

    States with fewer than two returns are left out. The result is NaN if no state is left.

    Args:
        returns: returns of each state.
    """
    each = [float(torch.tensor(one, dtype=torch.float64).var()) / len(one) for one in returns if len(one) > 1]
    return sum(each) / len(each) if each else math.nan


def explained_by_exact_values(returns: Sequence[Sequence[float]], starts: Sequence[int]) -> float:
    """Return the share of the variance of returns that exact state values would explain. No critic explains more.

    The rest of the variance is randomness of policy and environment. States with the same start are correlated, and
    their branches share random numbers. So the variance of values is estimated from pairs of states with different
    starts: half the squared difference of their means, minus the part caused by the spread within states. The estimate
    can be below 0.

    Args:
        returns: independent returns from each state. States with fewer than two returns are left out.
        starts: label of the start of each state; states with different labels are independent.

    Returns:
        The share; NaN with fewer than two starts, or if all returns are equal.
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
    others_N = len(known) - own_NC.sum(0)[which_N]  # number of states with which each state is compared
    mean_N = mean_N - mean_N.mean()  # centered for numerical precision
    # Sum (m - m')^2 = m^2 + m'^2 - 2 m m' over all pairs of states with different starts.
    sums_C = own_NC.T @ mean_N
    squares = 2 * (mean_N**2 * others_N).sum() - 2 * (mean_N.sum() ** 2 - (sums_C**2).sum())
    between = float((squares - 2 * (noise_N * others_N).sum()) / others_N.sum()) / 2
    within = float(variance_N.mean())
    return between / (between + within) if between + within > 0 else math.nan


WORST = 20  # number of turns with the largest errors that the report lists
LEAST_RANK = 0.2  # rank correlation below which the critic orders states hardly better than chance


class Audited(Exception):
    """Raised to end the run after its rollout was compared."""


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Args:
        forked: advantages measured by forks [B, A].
        values: agreement of the critic's values with the measured values; None if the run has no critic.
        noise: mean squared error of the measured values themselves.
        explainable: share of the variance of returns that exact values would explain.
        credit: agreement of estimators' advantages with the measured advantages, by the estimator's name.
        rollout: rollout with scores and forks.
        token_discount: discount from token to token in the run's estimator; forks have none.
    """

    forked: Tensor
    values: Agreement | None
    noise: float
    explainable: float
    credit: dict[str, Agreement]
    rollout: Rollout
    token_discount: float = 1.0


class AuditCritic(RolloutCallback):
    """Fork the next rollout, compare critic and estimators with the forks, and end the run.

    Args:
        forked: estimator of the advantages with which the other estimators are compared.
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
                f"{name} does not support forks, so no value can be measured (key data.init_args.interaction)"
            )
        agent.further_needs = Needs(forks=self.forked.needs_forks)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Play a rollout, even if a critic warm-up would reuse its stored rollouts."""
        stream = cast(Agent, pl_module).datamodule.stream
        assert stream is not None
        stream.source = None

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.found = audit(rollout, self.forked, agent.advantage)
        self.records = list(turn_records(rollout, agent.tokenizer))
        raise Audited


def audit(rollout: Rollout, forked: Forked, own: AdvantageEstimator) -> Audit:
    """Compare a critic, and all estimators whose inputs a rollout has, with the rollout's forks.

    Args:
        rollout: rollout with scores and forks.
        forked: estimator that uses the forks.
        own: estimator of the run; the other estimators have their default arguments.
    """
    assert rollout.state_values is not None
    at_states = rollout.action_mask & ~rollout.state_values.isnan()
    truth_BA, _ = forked.estimate(replace(rollout, shaped_rewards=None))  # rewards of branches contain no KL penalty
    credit = {}
    for name, estimator in _estimators(own):
        try:
            advantages_BA, _ = estimated(estimator, rollout)
        except ValueError:
            if estimator is own:
                raise
            continue  # the rollout lacks an input of this estimator
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
    """Return for each turn the discounted sum of advantages up to the next turn whose state was forked.

    Forks give only the sum over these turns, since ``r + gamma V' - V`` of consecutive turns telescopes.

    Args:
        advantages_BA: advantages of an estimator [B, A]; the advantage of each turn's first token is used.
        rollout: rollout with forks.
        gamma: discount from turn to turn.

    Returns:
        Sums [B, A] in float64, the same at all tokens of a turn; NaN if no later state was forked.
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
    """Yield name and object of the run's estimator, and of the package's other estimators except Forked."""
    if not isinstance(own, Forked):
        yield f"{type(own).__name__} (of the run)", own
    for name in advantages.__all__:
        kind = getattr(advantages, name)
        estimates = inspect.isclass(kind) and issubclass(kind, AdvantageEstimator) and not inspect.isabstract(kind)
        if estimates and kind not in (Forked, type(own)):
            yield name, kind()


def worst_turns(rollout: Rollout) -> list[tuple[Turn, float, float]]:
    """Return the turns with the largest errors of the critic, as tuples (turn, value, measured value)."""
    found: list[tuple[Turn, float, float]] = []
    for row, sample in enumerate(rollout.samples):
        for turn, *_, here in sample.placed_turns():
            if turn.branch_returns and rollout.scores.values is not None:
                value = float(rollout.scores.values[row, here.start])
                found.append((turn, value, statistics.fmean(turn.branch_returns)))
    return sorted(found, key=lambda one: -abs(one[1] - one[2]))[:WORST]


def audit_report(found: Audit, title: str, branches: int, every: int = 1) -> Report:
    """Return an audit as a report; ``branches`` and ``every`` are arguments of :class:`Forked`."""
    rollout = found.rollout
    played = sum(turn.forked_turns for turn in rollout.turns)
    forked = sum(bool(turn.branch_returns) for turn in rollout.turns)
    left = sum(turn.index % every == 0 and not turn.branch_returns for turn in rollout.turns)
    warning = (
        f"{left} more states have no branches: they were played ahead, their reply was not executed, or they could "
        "not be repeated"
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
            "branches are discounted from turn to turn only, so the effect of the discount within replies counts as "
            "an error of the critic and of the run's estimator below"
        )
        how.append(Entry("discount from token to token", f"{found.token_discount:g}", warning=warning, brief=True))
    tables = [Table("Forks", how)]
    if found.values is not None:
        tables.append(Table("Values of the critic", _values(found.values, found.noise)))
    rows = [
        Entry(name, f"rank {_known(one.rank, '.2f')}, squared error {_known(one.squared, '.4g')}", brief=True)
        for name, one in sorted(found.credit.items(), key=lambda item: -_or_zero(item[1].rank))
    ]
    about = "Compared with advantages of forks. Their scale affects the squared error, but not the rank correlation."
    if every > 1:
        about += " Advantages of turns without a measured value are added up."
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
        warning = "no state was forked"
    elif math.isnan(values.explained):
        warning = "all measured values are equal, so there is no order of states to learn"
    elif values.rank < LEAST_RANK or math.isnan(values.rank):
        warning = (
            "its order of states is hardly better than chance: use a longer warm-up, or an estimator without a critic "
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
        return "unknown with one branch per state, use more (argument --branches)"
    return f"{noise:.4g}, estimated from their spread"


def _known(number: float, form: str) -> str:
    """Return a formatted number, or "unknown" for NaN."""
    return "unknown" if math.isnan(number) else f"{number:{form}}"


def _or_zero(x: float) -> float:
    return 0.0 if math.isnan(x) else x
