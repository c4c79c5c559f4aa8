"""The ablations: an arm changes what it names and nothing else, and the table has the right numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import intervals
from benchmarks.ablations.run import ARMS, BASE_CONFIG, REWARD, area, arguments_of, table
from benchmarks.intervals import Record
from benchmarks.quickstart_seeds import difference_interval
from tests.parsing import fit_parser

RESULTS = Path(__file__).parents[1] / "docs" / "results"

# The arms


@pytest.fixture(scope="module")
def parser() -> Any:
    return fit_parser()


def settings(parser: Any, arguments: Sequence[str] = ()) -> dict[str, Any]:
    parsed = parser.parse_args(["fit", "--config", str(BASE_CONFIG), *arguments]).fit.as_dict()
    return flat({key: parsed[key] for key in ("model", "data", "trainer", "seed_everything")})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted keys and what is there; lists count as one value."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: x for part, below in value.items() for key, x in flat(below, f"{name}.{part}".strip(".")).items()}


@pytest.mark.slow
def test_an_arm_changes_what_it_names_and_nothing_else(parser: Any) -> None:
    """And an iteration is as long in every arm."""
    base = settings(parser)
    for arm, overrides in ARMS.items():
        values = settings(parser, arguments_of(arm))
        changed = {key for key in base.keys() | values.keys() if base.get(key) != values.get(key)}
        for key, value in overrides.items():
            below = {name for name in changed if name == key or name.startswith(f"{key}.")}
            assert below, f"{key} is the same in the base run"
            changed -= below
            if isinstance(value, float | int):
                assert values[key] == value
                assert isinstance(values[key], float | int)  # not a text that looks like a number
        assert not changed, arm
        assert values["data.init_args.num_envs"] * values["data.init_args.turns_per_env"] == 128
        assert values["trainer.max_epochs"] == base["trainer.max_epochs"]
        assert values["trainer.enable_checkpointing"] is False


# The numbers


def records(*afters: float, curve: Sequence[Sequence[float]] = ((1, 0.0), (2, 1.0))) -> list[Record]:
    before = {"success": 0.3, "episodes": 10}
    return [{"before": before, "after": before | {"success": after}, "curve": curve} for after in afters]


def test_differences_of_three_seeds() -> None:
    """By hand: variances 0.01 of three runs each, so an error of sqrt(2 * 0.01 / 3) = 0.08165 and t(4) = 2.776."""
    base, arm = records(0.5, 0.6, 0.7), records(0.8, 0.9, 1.0)
    assert intervals.pooled(base, "after") == (18, 30)
    assert intervals.pooled(arm, "after") == (27, 30)
    difference = intervals.success_difference(arm, base)
    assert difference == pytest.approx((0.3, 0.3 - 0.22666, 0.3 + 0.22666), abs=1e-4)


def test_runs_that_agree_by_luck_keep_the_interval_of_their_episodes() -> None:
    difference = intervals.success_difference(records(0.6, 0.6, 0.6), records(0.5, 0.5, 0.5))
    assert difference == pytest.approx(difference_interval((18, 30), (15, 30)))


def test_degrees_of_freedom_are_rounded_down() -> None:
    """By hand: all variance in one arm leaves its own 2 degrees; (0, 1, 2) has variance 1, so sqrt(1 / 3) * 4.303."""
    assert intervals.welch([0, 1, 2], [5, 5, 5]) == pytest.approx((-4, -4 - 2.4843, -4 + 2.4843), abs=1e-3)
    assert intervals.welch([1], [2]) is None


def test_the_area_is_the_mean_height() -> None:
    """By hand: (1 * 0.05 + 2 * 0.2) / 3."""
    assert area({"curve": [[1, 0.0], [2, 0.1], [4, 0.3]]}) == pytest.approx(0.15)
    assert area({"curve": [[2, 0.4]]}) == 0.4


def test_the_table_of_the_repository_has_the_numbers_of_its_runs() -> None:
    """Numbers are never written by hand."""
    runs: dict[str, dict[int, Record]] = {arm: {} for arm in ARMS}
    for record in json.loads((RESULTS / "ablations.json").read_text()):
        runs[record["arm"]][record["seed"]] = record | {"curve": record["curves"][REWARD]}
    page = (RESULTS / "ablations.md").read_text()
    rows = table(runs).splitlines()[2:]
    assert len(rows) == len(ARMS) - 1
    for row in rows:
        assert row.split("|", 2)[2].strip() in page
