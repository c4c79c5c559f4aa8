"""Repetition and diversity of what is written: `text/*`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_agentrl.metrics.rollout import bigrams, mean_distance, text_numbers
from lightning_agentrl.types import Turn
from tests.metrics.rollouts import by_hand
from tests.types.samples import turn

# Word pairs of the replies, those in brackets said before in the same reply, those with * in an earlier one:
#   A  think-red red-door door-action action-open
#   B  think-red* red-door* door-action* action-open*
#   C  go-go (go-go go-go)
#   D  think-a a-key key-a (a-key) key-action action-take
#   E  think-a* a-red red-door* door-action* action-go
#   F  think-walk walk-action action-north
#   G  think-walk* walk-north north-action action-north*
#   H  think-a* a-red* red-cow cow-a (a-red red-cow)
PAIRS = 4 + 4 + 3 + 6 + 5 + 3 + 4 + 6
# Last thoughts, as sets of word pairs:
#   environment 0 (B, since C has none)  red-door
#   environment 1 (E)                    a-red red-door
#   environment 2 (H)                    a-red red-cow cow-a
EXPECTED = {
    "text/distinct_in_turn": (4 + 4 + 1 + 5 + 5 + 3 + 4 + 4) / PAIRS,
    "text/distinct_across_turns": (4 + 0 + 1 + 5 + 2 + 3 + 2 + 2) / PAIRS,
    "text/thought_copies": (1 + 0 + 0) / 3,  # B repeats A; G and H say something else; the others begin here
    "text/thought_diversity": ((1 - 1 / 2) + (1 - 0 / 4) + (1 - 1 / 4)) / 3,  # shared among all: 0-1, 0-2, 1-2
}


def thinking(*thoughts: str, **fields: Any) -> list[Turn]:
    """Turns of one episode."""
    return [turn(index=index, thought=thought, **fields) for index, thought in enumerate(thoughts)]


def test_every_number_by_hand():
    assert text_numbers(by_hand().turns) == pytest.approx(EXPECTED, rel=0, abs=1e-12)


def test_word_pairs_are_without_case_and_punctuation():
    assert bigrams("Go LEFT, go -- left!\nStraße 2") == ["go left", "left go", "go left", "left strasse", "strasse 2"]
    assert bigrams("word") == bigrams("") == []


def test_the_order_of_turns_does_not_matter():
    turns = by_hand().turns
    assert text_numbers(turns[::-1]) == pytest.approx(EXPECTED, rel=0, abs=1e-12)
    assert text_numbers(turns[3:] + turns[:3]) == pytest.approx(EXPECTED, rel=0, abs=1e-12)


def test_replies_of_one_word_each_have_no_pairs():
    assert text_numbers([turn(reply="go"), turn(index=1, reply="")]) == {}


def test_a_copy_equals_the_thought_of_the_turn_before_in_its_episode():
    assert text_numbers(thinking("left", "left", "left"))["text/thought_copies"] == 2 / 2
    assert text_numbers(thinking("left", "right", "left"))["text/thought_copies"] == 0 / 2
    # the turn before is neither of another episode nor of another environment
    for other in ({"episode": 1}, {"env": 1}):
        assert "text/thought_copies" not in text_numbers(thinking("left") + thinking("left", **other))
        assert text_numbers(thinking("left", "right") + thinking("right", **other))["text/thought_copies"] == 0 / 1


def test_missing_thoughts_are_no_copies_of_each_other():
    assert "text/thought_copies" not in text_numbers(thinking("left", "", ""))
    assert (
        text_numbers(thinking("left", "", "left", "left"))["text/thought_copies"] == 1 / 2
    )  # a thought after none is new


def test_a_thought_whose_turn_before_was_played_in_an_earlier_rollout_is_left_out():
    first, second, third = thinking("left", "left", "left")
    assert "text/thought_copies" not in text_numbers([first, third])
    assert text_numbers([second, third])["text/thought_copies"] == 1 / 1


def test_the_last_thought_of_an_environment_counts_whatever_was_thought_before():
    def diversity(*turns: Turn) -> float:
        return text_numbers(turns)["text/thought_diversity"]

    same, other = turn(env=1, thought="go left now"), turn(env=1, thought="take the key")
    assert diversity(*thinking("take it", "go left now"), same) == 0  # later turn
    assert diversity(turn(episode=1, thought="go left now"), *thinking("take it", "so so"), same) == 0  # later episode
    assert diversity(*thinking("take it", "go left now", ""), same) == 0  # the last that there is
    assert diversity(*thinking("take it", "go left now"), other) == 1


def test_one_environment_has_no_diversity():
    assert "text/thought_diversity" not in text_numbers(thinking("go left", "go right"))


def test_environments_whose_last_thought_is_one_word_are_left_out_of_the_diversity():
    numbers = text_numbers([turn(env=0, thought="go left"), turn(env=1, thought="go right"), turn(env=2, thought="go")])
    assert numbers["text/thought_diversity"] == 1


def test_mean_distance_of_sets_with_many_members_says_nothing_but_the_number():
    """Of thousands, of which each set has half of the next one's; and without a warning of torch."""
    sets = torch.tensor([(k, member) for k in range(3) for member in range(4000 * k, 4000 * (k + 2))])
    torch.set_warn_always(True)  # else only the first process-wide call would tell
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert mean_distance(sets) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    finally:
        torch.set_warn_always(False)
