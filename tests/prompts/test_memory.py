from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.prompts.memory import (
    ActionsOnlyMemory,
    ClearingMemory,
    FullMemory,
    Memory,
    PastTurn,
    Recollection,
    WindowMemory,
)

PAST = [PastTurn(f"room {i}", f"idea {i}", f"act {i}") for i in range(7)]


def test_window_shows_the_last_turns():
    assert WindowMemory(2).recall(PAST).turns == tuple(PAST[-2:])
    assert WindowMemory().recall(PAST) == Recollection(tuple(PAST[-1:]))
    assert WindowMemory(0).recall(PAST) == Recollection()
    assert WindowMemory(9).recall(PAST).turns == tuple(PAST)
    assert WindowMemory(3).recall([]) == Recollection()


def test_window_keeps_the_newest_thoughts():
    turns = WindowMemory(3, thoughts=1).recall(PAST).turns
    assert [turn.thought for turn in turns] == ["", "", "idea 6"]
    assert [turn.action for turn in turns] == ["act 4", "act 5", "act 6"]
    assert [turn.thought for turn in WindowMemory(3, thoughts=0).recall(PAST).turns] == ["", "", ""]
    assert [turn.thought for turn in WindowMemory(3, thoughts=2).recall(PAST[:1]).turns] == ["idea 0"]


def test_actions_only_is_a_note():
    memory = ActionsOnlyMemory(3)
    assert memory.recall(PAST) == Recollection(note="Your last actions, oldest first: act 4, act 5, act 6")
    assert memory.recall([]) == Recollection()


def test_clearing_forgets_everything():
    shown = [len(ClearingMemory(3).recall(PAST[:count]).turns) for count in range(8)]
    assert shown == [0, 1, 2, 0, 1, 2, 0, 1]
    assert ClearingMemory(3).recall(PAST).turns == (PAST[6],)
    assert ClearingMemory(1).recall(PAST) == Recollection()


def test_full_memory_grows():
    assert FullMemory().recall(PAST).turns == tuple(PAST)
    assert [m.grows for m in (FullMemory(), WindowMemory(), ActionsOnlyMemory(1), ClearingMemory(2))] == [
        True,
        False,
        False,
        False,
    ]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 6))
def test_longest_bounds_what_is_looked_at(length, turns, thoughts):
    past = [PastTurn(str(i), str(i), str(i)) for i in range(length)]
    memories: list[Memory] = [
        WindowMemory(turns, min(thoughts, turns)),
        ActionsOnlyMemory(turns),
        ClearingMemory(turns),
        FullMemory(),
    ]
    for memory in memories[:-1]:
        assert memory.longest is not None
        assert len(memory.recall(past).turns) <= memory.longest
    assert memories[-1].longest is None
    for memory in memories[:2]:  # a sliding window needs no older turn
        assert memory.longest is not None
        assert memory.recall(past[max(length - memory.longest, 0) :]) == memory.recall(past)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowMemory(-1), "turns must be at least 0"),
        (lambda: WindowMemory(2, thoughts=-1), "thoughts must be at least 0"),
        (lambda: WindowMemory(1, thoughts=2), r"thoughts \(2\) must not exceed turns \(1\)"),
        (lambda: ActionsOnlyMemory(0), "turns must be at least 1"),
        (lambda: ClearingMemory(0), "every must be at least 1"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
