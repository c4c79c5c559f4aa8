"""What invalid replies say, and that a suggested alias makes the parser understand them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.interaction import invents
from lightning_agentrl.metrics.invalid_replies import Invalid, invalid_replies, judge
from lightning_agentrl.prompts.parser import TolerantParser, named, spellings

ROOM = Contract(actions={"turn left": "", "turn right": "", "go forward": ""}, aliases={"forward": "go forward"})
KNOWN = spellings(ROOM.actions, ROOM.aliases)

WORDS = ("go", "forward", "turn", "left", "right", "lift", "not", "or", "please", "**", ".", "\n", "ACTION:", "<think>")
JUDGED = [
    ("", False, Invalid.EMPTY, ""),
    ("", True, Invalid.CUT, ""),
    ("I should go forward now", False, Invalid.SPELLED, "i should go forward"),
    ("ACTION: please **turn left**", False, Invalid.SPELLED, "please turn left"),
    ("trun left", False, Invalid.SPELLED, "trun left"),
    ("either turn left or turn right", False, Invalid.SEVERAL, ""),
    ("turn left or jump", False, Invalid.SEVERAL, ""),  # "turn left" is no alias to suggest
    ("I will not go forward", False, Invalid.TALK, ""),
    ("since the door behind the wall is open now we go forward", False, Invalid.TALK, ""),
    ("THINK: a door\nACTION: open door", False, Invalid.INVENTED, ""),
    ("turn round", False, Invalid.INVENTED, ""),  # 0.7 like "turn right"
    ("the door is locked and there is no key anywhere", False, Invalid.TALK, ""),
    ("the door is locked and there is no key anywhere", True, Invalid.CUT, ""),
]


@pytest.mark.parametrize(("reply", "cut", "kind", "alias"), JUDGED)
def test_a_reply_is_judged_by_what_it_says(reply: str, cut: bool, kind: Invalid, alias: str) -> None:
    assert TolerantParser().parse(reply, list(ROOM.actions), ROOM.aliases).action is None  # or it would not be judged
    found, suggested, action = judge(named(reply), cut, KNOWN)
    assert (found, suggested) == (kind, alias)
    if alias:
        parsed = TolerantParser().parse(reply, list(ROOM.actions), {**ROOM.aliases, suggested: action})
        assert parsed.action == action


@given(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), st.booleans())
def test_whatever_is_suggested_is_understood_from_then_on(reply: str, cut: bool) -> None:
    _, alias, action = judge(named(reply), cut, KNOWN)
    if alias and named(reply) not in KNOWN:
        assert TolerantParser().parse(alias, list(ROOM.actions), {**ROOM.aliases, alias: action}).action == action


def test_the_commonest_come_first() -> None:
    replies = ["dance", "please turn left", "dance", "please go forward", "please go forward", "please go forward"]
    found = invalid_replies([(reply, False, False, KNOWN) for reply in replies] + [("turn left", True, False, KNOWN)])
    assert found.kinds == {Invalid.SPELLED: 4, Invalid.INVENTED: 2, Invalid.REFUSED: 1}
    assert list(found.texts) == ["please go forward", "dance", "please turn left", "turn left"]
    assert found.invented == {"dance": 2}
    assert invalid_replies([("", False, False, KNOWN)]).texts == {}
    assert list(found.aliases.items()) == [
        ("please go forward", ("go forward", 3)),
        ("please turn left", ("turn left", 1)),
    ]


def test_an_alias_of_two_meanings_has_the_commoner_one() -> None:
    """Actions differ between episodes."""
    rooms = [{"go": "walk"}, {"go": "run"}, {"go": "run"}]
    found = invalid_replies([("now go", False, False, room) for room in rooms])
    assert found.aliases == {"now go": ("run", 2)}


@pytest.mark.parametrize(
    ("reply", "cut", "invented"),
    [("fly", False, True), ("ACTION: open the window", False, True), ("fly", True, False), ("", False, False)],
)
def test_a_reply_invents_an_action_if_it_names_one_that_there_is_not(reply: str, cut: bool, invented: bool) -> None:
    assert invents(reply, cut, ROOM) is invented
    assert not invents(reply, cut, Contract(free_text=True))
