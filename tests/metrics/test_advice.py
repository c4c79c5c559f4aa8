"""One of six settings from numbers, each by the rule that it is for; what is cited stands where it is said to stand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.metrics import advice as rules
from lightning_agentrl.metrics.advice import Cited, Setting, Sure, advise
from lightning_agentrl.metrics.facts import UNKNOWN, Facts, Measured

DOCS = Path(__file__).parents[2] / "docs"
FACTS = Facts(
    episodes=50,
    starts=13,
    shared_starts=13,
    turns=600,
    lost=0,
    unended=0,
    reply_tokens=(1, 1),
    horizon=(12, 24),
    cut=Measured(0.5, 0.4, 0.6),
    begin_alike=Measured(1.0, 0.8, 1.0),
    met_in_others=Measured(0.8, 0.7, 0.9),
    met_again=Measured(0.2, 0.1, 0.3),
    mean_return=0.3,
    above_least=Measured(0.3, 0.2, 0.4),
    between=0.0,
    within=0.2,
    mixed=Measured(0.8, 0.5, 0.95),
    rewarded=Measured(0.02, 0.01, 0.03),
    told_apart=Measured(0.02, 0.01, 0.03),
    on_the_way=Measured(0.0, 0.0, 0.0),
    repeats=Measured(1.0, 0.7, 1.0),
    uncertain=Measured(0.0, 0.0, 0.1),
    explained=Measured(0.1, 0.0, 0.2),
    first_values=0.0,
    mean_turns=20.0,
    iteration_turns=512,
)
START_DECIDES = {"mixed": Measured(0.0, 0.0, 0.2), "between": 0.2, "within": 0.0}
DENSE = {"told_apart": Measured(0.5, 0.4, 0.6), "on_the_way": Measured(0.9, 0.8, 1.0)}
NO_STATES = {"met_in_others": Measured(0.05, 0.0, 0.1)}
CASES: list[tuple[dict[str, Any], Setting, Sure]] = [
    ({}, Setting.GROUPS_BY_STATE, Sure.WEAK),
    (NO_STATES, Setting.GROUPS, Sure.GUESS),
    (NO_STATES | {"horizon": (40, 40)}, Setting.GROUPS, Sure.GUESS),
    (NO_STATES | {"horizon": (60, 80)}, Setting.LONG_CUTS, Sure.GUESS),
    ({"horizon": (1, 1), "met_in_others": UNKNOWN}, Setting.GROUPS, Sure.GUESS),
    (START_DECIDES, Setting.LONG_CUTS, Sure.WEAK),
    (START_DECIDES | {"mixed": Measured(0.1, 0.02, 0.3)}, Setting.LONG_CUTS, Sure.GUESS),
    (START_DECIDES | {"shared_starts": 1, "between": math.nan}, Setting.LONG_CUTS, Sure.GUESS),
    (START_DECIDES | {"horizon": (3, 3)}, Setting.SHORT_CUTS, Sure.GUESS),
    (START_DECIDES | {"first_values": 1.0}, Setting.WARM_UP, Sure.WEAK),
    ({"first_values": 1.0}, Setting.GROUPS_BY_STATE, Sure.WEAK),  # no critic is needed
    ({"mixed": Measured(0.1, 0.02, 0.3)}, Setting.GROUPS_BY_STATE, Sure.GUESS),  # rare, but not for the start
    ({"above_least": Measured(0.0, 0.0, 0.1)} | START_DECIDES | {"between": 0.0}, Setting.LONG_CUTS, Sure.GUESS),
    (DENSE, Setting.GROUPS_BY_STATE, Sure.WEAK),
    (DENSE | NO_STATES, Setting.LONG_CUTS, Sure.GUESS),
    (DENSE | {"explained": Measured(0.6, 0.4, 0.8)}, Setting.LONG_CUTS, Sure.GUESS),
    ({"unended": 10}, Setting.LONG_CUTS, Sure.WEAK),
    ({"begin_alike": Measured(0.5, 0.3, 0.7)}, Setting.LONG_CUTS, Sure.WEAK),
    ({"mean_turns": 100.0}, Setting.LONG_CUTS, Sure.GUESS),
    ({"whole_games": True, "unended": 10}, Setting.GROUPS_BY_STATE, Sure.WEAK),
    ({"episodes": 8, "shared_starts": 2}, Setting.GROUPS_BY_STATE, Sure.GUESS),
    ({"shared_starts": 0, "begin_alike": UNKNOWN, "mixed": UNKNOWN}, Setting.LONG_CUTS, Sure.GUESS),
]


@pytest.mark.parametrize(("changes", "setting", "sure"), CASES)
def test_each_rule_leads_to_its_setting(changes: dict[str, Any], setting: Setting, sure: Sure) -> None:
    found = advise(replace(FACTS, **changes))
    assert (found.setting, found.sure) == (setting, sure)
    assert {one.part for one in found.choices} == {"estimator", "discounts", "cut", "group size", "warm-up"}
    assert found.choices[0].decides


def test_an_episode_of_one_turn_has_one_turn() -> None:
    said = {n: str(advise(replace(FACTS, **START_DECIDES, horizon=(n, n))).choices) for n in (1, 2)}
    assert "a median episode has 1 turn, so" in said[1]
    assert "a median episode has 2 turns, so" in said[2]


def test_notes_say_what_is_wrong_with_a_task() -> None:
    changes = {"repeats": Measured(0.5), "uncertain": Measured(0.4), "met_again": Measured(0.7), "lost": 2}
    notes = " ".join(advise(replace(FACTS, episodes=4, **changes)).notes)
    for part in ("not enough episodes: 4", "does not repeat", "different outcomes in 40 %", "circles", "2 episodes"):
        assert part in notes
    assert "nothing" not in " ".join(advise(FACTS).notes)
    flat = advise(replace(FACTS, above_least=Measured(0.0)))
    assert "no setting learns" in " ".join(flat.notes)


@pytest.mark.parametrize("cited", [each for each in vars(rules).values() if isinstance(each, Cited)], ids=str)
def test_what_is_cited_stands_there(cited: Cited) -> None:
    text = (DOCS / cited.page).read_text()
    (section,) = [part for part in re.split(r"^##+ ", text, flags=re.M) if part.startswith(cited.section + "\n")]
    numbers = re.findall(r"\d\.\d+", cited.figure)
    assert all(number in section for number in numbers)
    if not numbers:
        assert "advantage is 0" in text


@pytest.mark.parametrize("horizon", [(3, 3), (12, 24)])
@pytest.mark.parametrize("first_values", [0.0, 1.0])
@pytest.mark.parametrize("whole_games", [False, True])
@pytest.mark.parametrize("met", [0.05, 0.8])
def test_where_no_return_differs_the_reasons_go_together(
    horizon: tuple[int, int], first_values: float, whole_games: bool, met: float
) -> None:
    """No reason asks for a long cut beside one for a short cut, and none for what 0 % of the starts show."""
    same = START_DECIDES | {"above_least": Measured(0.0, 0.0, 0.1), "between": 0.0, "met_in_others": Measured(met)}
    facts = replace(FACTS, **same, horizon=horizon, first_values=first_values, whole_games=whole_games)
    choices = {one.part: one for one in advise(facts).choices}
    assert ("whole games only" if whole_games else "returned the same") in choices["estimator"].why
    assert not any("long cut" in one.why or "returns differ in" in one.why for one in choices.values())
