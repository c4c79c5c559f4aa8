"""Numbers of thoughts, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.tools.inspect import thoughts

TEXT = st.text("ab .\n", max_size=20)


def test_episodes_without_thoughts_have_no_numbers() -> None:
    assert thoughts([]) is None
    assert thoughts([[("", "a prompt")]]) is None


def test_thoughts_by_hand() -> None:
    found = thoughts(
        [
            [("Go to the door.", "Find it: go to the door"), ("go to the door", "walls"), ("", "walls")],
            [("go to the key", "walls")],
        ]
    )
    assert found is not None
    assert (found.count, found.missing) == (3, 1)
    assert found.distinct == {1: 5 / 12, 2: 4 / 9, 3: 3 / 6}  # go to the door key; pairs: go-to to-the the-door the-key
    assert found.within == 1.0
    assert (found.similarity, found.equal) == (1.0, 1.0)  # only within an episode, whatever the case and marks
    assert found.copied == pytest.approx(1 / 3)  # one run of four words in each thought, and one of them was read


def test_a_thought_that_repeats_itself_and_one_that_changes() -> None:
    found = thoughts([[("left left left left", ""), ("left right", "")]])
    assert found is not None
    assert found.within == pytest.approx((1 / 3 + 1) / 2)
    assert (found.similarity, found.equal) == (0.0, 0.0)


def test_a_thought_behind_a_reply_without_one_is_compared_with_none() -> None:
    found = thoughts([[("", ""), ("go left", ""), ("Go left!", ""), ("...", ""), ("go left", "")]])
    assert found is not None
    assert (found.count, found.missing) == (4, 1)
    assert (found.similarity, found.equal) == (0.5, 0.5)  # with the one before, and of dots with words


@given(st.lists(st.lists(st.tuples(TEXT, TEXT), max_size=4), max_size=3))
def test_shares_are_shares(episodes: list[list[tuple[str, str]]]) -> None:
    found = thoughts(episodes)
    if found is not None:
        shares = [*found.distinct.values(), found.within, found.similarity, found.equal, found.copied]
        assert all(share is None or 0 <= share <= 1 for share in shares)
        assert found.count + found.missing == sum(map(len, episodes))
