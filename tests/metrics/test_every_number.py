"""A guard over all numbers: what a real fit logs is documented, what is documented is logged, and all of it is tested.

A new number fails here until docs/metrics.md says what it means and a test of this folder computes it by hand.
"""

from __future__ import annotations

import csv
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.losses import ClipCov, RatioRejection, TruncatedWeights
from lightning_agentrl.metrics.stages import STAGES
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply
from lightning_agentrl.rollout import TurnInteraction, ValidationConfig
from lightning_agentrl.types import Rollout, StopReason
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.test_not_finite import COUNTED
from tests.metrics.test_episodes import VAL_EXPECTED, WINDOW
from tests.metrics.test_fork_numbers import OF_FORKS
from tests.metrics.test_group_numbers import EXPECTED as GROUPS_EXPECTED
from tests.metrics.test_group_numbers import OF_FILTER
from tests.metrics.test_images import OF_IMAGES
from tests.metrics.test_mismatch import EXPECTED as MISMATCH_EXPECTED
from tests.metrics.test_mismatch import OF_CORRECTION, OF_STALENESS
from tests.metrics.test_rollout_numbers import EXPECTED as ROLLOUT_EXPECTED
from tests.metrics.test_sources import OF_ALL_SOURCES, OF_SOURCES
from tests.metrics.test_stages import EXPECTED as STAGES_EXPECTED
from tests.metrics.test_stages import OF_BACKGROUND
from tests.metrics.test_text import EXPECTED as TEXT_EXPECTED
from tests.metrics.test_token_numbers import EXPECTED as TOKENS_EXPECTED
from tests.metrics.test_update_metrics import OF_COEFFICIENT, OF_PICKS, OF_STEPS
from tests.metrics.test_values import EXPECTED as VALUES_EXPECTED

DOCS = Path(__file__).parents[2] / "docs"

# Names that a test of this folder computes by hand
OF_POPART = ("critic/popart_mean", "critic/popart_std")
TESTED = set().union(
    OF_POPART,
    ROLLOUT_EXPECTED,
    GROUPS_EXPECTED,
    OF_FILTER,
    TOKENS_EXPECTED,
    MISMATCH_EXPECTED,
    OF_CORRECTION,
    OF_STALENESS,
    OF_IMAGES,
    OF_FORKS,
    TEXT_EXPECTED,
    VALUES_EXPECTED,
    STAGES_EXPECTED,
    OF_BACKGROUND,
    [WINDOW],
    VAL_EXPECTED,
    OF_ALL_SOURCES,
    OF_SOURCES,
    OF_STEPS,
    OF_PICKS,
    OF_COEFFICIENT,
    COUNTED,
)
NO_SCALARS = (
    "histogram/episode_turns",  # drawn by the callback RolloutReport, where the logger has histograms
    "histogram/reply_tokens",
    "histogram/turn_reward",
)
CAN_BE_NAN = {"critic/explained_variance"}
OF_LIGHTNING = {"epoch", "step"}
PLACEHOLDERS = {
    "<reason>": "|".join(StopReason),
    "<stage>": "|".join(STAGES),
    "<name>": r"[\w/-]+",  # what the environment calls it
    "<kind>": r"\w+",  # class of an error
}
NAMESPACES = {name.split("/")[0] for name in (*TESTED, *NO_SCALARS)}

WARMUP, TRAIN = [0], [1, 2]  # iterations
POPART = 0.25
TURNS = 16  # of an iteration


class Thinker(ActionParser):
    """Finds a thought and an action in whatever a random model writes."""

    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        action = list(actions)[len(reply) % len(actions)]
        return ParsedReply(f"I think {reply}", action, len(reply) // 2)


@dataclass
class Fit:
    """What was logged in each iteration, and the rollouts that were collected."""

    logged: list[dict[str, float]]
    rollouts: list[Rollout]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Fit:
    """One iteration of warm-up, two of training, a validation in the last one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("fit")
    rollouts: list[Rollout] = []

    class Keep(RolloutCallback):
        def on_train_start(self, trainer: L.Trainer, agent: Any) -> None:
            with agent.clock.stage("validate"):  # as RunSummary does; it belongs to no iteration
                pass

        def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
            rollouts.append(rollout)

    callbacks = [Keep(), CriticWarmup(rollouts=1, rounds=1, fraction=1.0)]
    settings = {"logger": CSVLogger(folder), "limit_val_batches": 1.0}
    trainer = make_trainer(folder, 3, callbacks, log_every_n_steps=1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the critic has not converged
        agent = make_agent(
            tiny_folder,
            SharedCritic(popart=POPART),
            variance_proxy=True,
            policy_loss=ClipCov(),
            kl_loss=0.01,
            correction=TruncatedWeights(rejections=[RatioRejection("mean", 0.5, 2.0)]),
        )
        agent.recent_episodes.enough = 1  # few end in three iterations
        interaction = TurnInteraction(max_reply_tokens=4, parser=Thinker())
        trainer.fit(agent, make_data(interaction=interaction, validation=ValidationConfig(8, 4, every=3)))
    (file,) = folder.rglob("metrics.csv")
    logged: list[dict[str, float]] = [{}, {}, {}]
    with file.open() as lines:
        for row in csv.DictReader(lines):
            numbers = {name: float(number) for name, number in row.items() if number and name not in OF_LIGHTNING}
            logged[int(row["epoch"])] |= numbers
    return Fit(logged, rollouts)


def named_in(page: str) -> set[str]:
    """All names of numbers in backticks, patterns among them."""
    found = re.findall(r"`([a-z_]+/[\w/<>]+)`", (DOCS / page).read_text(encoding="utf-8"))
    return {name for name in found if name.split("/")[0] in NAMESPACES}


def documented() -> set[str]:
    return named_in("metrics.md")


def matches(name: str, pattern: str) -> bool:
    parts = re.split(r"(<\w+>)", pattern)
    regex = "".join(f"(?:{PLACEHOLDERS[part]})" if part.startswith("<") else re.escape(part) for part in parts)
    return re.fullmatch(regex, name) is not None


def all_names(logged: Iterable[Mapping[str, float]]) -> set[str]:
    return {name for numbers in logged for name in numbers}


@pytest.mark.slow
def test_every_logged_number_is_documented(fit):
    names = documented()
    assert not {name for name in all_names(fit.logged) if not any(matches(name, pattern) for pattern in names)}


@pytest.mark.slow
def test_every_documented_number_is_logged(fit):
    logged = all_names(fit.logged)
    missing = {pattern for pattern in documented() if not any(matches(name, pattern) for name in logged)}
    # This fit has no groups, forks and images, collects nothing ahead, and no environment fails.
    of_groups = {*GROUPS_EXPECTED, *OF_FILTER}
    of_ahead = {*OF_IMAGES, *OF_STALENESS, "time/collect_beside_seconds"}
    of_faults = {"env/errors/<kind>", "env/lost/<kind>"}
    of_sources = {"rollout/source/<name>", "val/source/<name>", *OF_ALL_SOURCES}
    assert missing == {*NO_SCALARS, *OF_FORKS, *of_faults, *of_groups, *of_ahead, *of_sources}


def test_every_logged_number_is_computed_by_hand_in_a_test(fit):
    assert all_names(fit.logged) <= TESTED


def test_every_tested_number_is_documented():
    """Also those that this fit does not log."""
    assert not {name for name in TESTED if not any(matches(name, pattern) for pattern in documented())}


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md") if page.name != "metrics.md"))
def test_other_pages_name_documented_numbers_only(page):
    assert not {name for name in named_in(page) if not any(matches(name, pattern) for pattern in documented())}


def test_documented_patterns_are_not_too_wide():
    """Numbers with a row of their own do not hide behind a pattern."""
    names = documented()
    assert {"env/retries", "time/iteration_seconds", "time/collect_to_update", "time/env_to_generation"} <= names
    assert matches("stop/env_done", "stop/<reason>")
    assert not matches("stop/tired", "stop/<reason>")
    assert not matches("time/iteration_seconds", "time/<stage>_seconds")
    assert matches("env/achievement/wood", "env/<name>")
    assert {part for name in names for part in re.findall(r"<\w+>", name)} == PLACEHOLDERS.keys()


def test_numbers_of_training_are_finite(fit):
    for iteration in TRAIN:
        wrong = {name for name, number in fit.logged[iteration].items() if not math.isfinite(number)}
        assert wrong <= CAN_BE_NAN
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^\| `{name}` .*NaN", text, re.MULTILINE) for name in CAN_BE_NAN)


def test_training_logs_everything_in_every_iteration_but_validation(fit):
    first, last = (fit.logged[iteration].keys() for iteration in TRAIN)
    assert last - first == {*VAL_EXPECTED, "time/validate_seconds"}
    assert first <= last


def test_the_warm_up_lacks_only_the_numbers_of_the_actors_update(fit):
    (warm,) = (fit.logged[iteration].keys() for iteration in WARMUP)
    of_steps = {name for name in OF_STEPS if name.startswith(("policy/", "variance_proxy/"))}
    of_actor = of_steps | OF_PICKS | {"grad_norm/actor"}
    assert fit.logged[TRAIN[0]].keys() - warm == of_actor
    assert warm <= fit.logged[TRAIN[0]].keys()
    assert fit.logged[WARMUP[0]]["kl/reference"] == pytest.approx(0, abs=1e-6)  # the actor is still the reference


def test_units_of_the_critic_are_a_mixture_of_the_returns(fit):
    """The newest rollout weighs most; all weights together are 1."""
    for iteration in (*WARMUP, *TRAIN):
        seen = fit.logged[: iteration + 1]
        weights = [(1 - POPART) ** age for age in range(iteration + 1)][::-1]
        mean = sum(w * of["critic/return_mean"] for w, of in zip(weights, seen, strict=True)) / sum(weights)
        squares = [of["critic/return_std"] ** 2 + of["critic/return_mean"] ** 2 for of in seen]
        spread = sum(w * x for w, x in zip(weights, squares, strict=True)) / sum(weights) - mean**2
        logged = [fit.logged[iteration][name] for name in OF_POPART]
        assert logged == pytest.approx([mean, math.sqrt(spread)], rel=1e-5)


def test_times_are_those_of_the_same_iteration(fit):
    """Each stage has worked through the turns and tokens of this iteration's rollout, and through nothing else."""
    assert ["time/validate_seconds" in numbers for numbers in fit.logged] == [False, False, True]
    assert len(fit.rollouts) == len(fit.logged) == 3
    for numbers, rollout in zip(fit.logged, fit.rollouts, strict=True):
        tokens = sum(len(sample.ids) for sample in rollout.samples)
        assert len(rollout.turns) == TURNS
        for stage in ("collect", "score", "update"):
            seconds = numbers[f"time/{stage}_seconds"]
            assert seconds * numbers[f"time/{stage}_turns_per_second"] == pytest.approx(TURNS, rel=1e-4)
            assert seconds * numbers[f"time/{stage}_tokens_per_second"] == pytest.approx(tokens, rel=1e-4)
        ratio = numbers["time/collect_seconds"] / numbers["time/update_seconds"]
        assert numbers["time/collect_to_update"] == pytest.approx(ratio, rel=1e-4)
        stages = sum(numbers.get(f"time/{stage}_seconds", 0.0) for stage in STAGES)
        assert numbers["time/iteration_seconds"] >= stages * (1 - 1e-6)
        of_weights = numbers["time/collect_seconds"] + numbers.get("time/validate_seconds", 0.0)
        assert 0 < numbers["time/sync_seconds"] <= of_weights
