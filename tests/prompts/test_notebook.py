from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.prompts.memory import NotebookMemory, PastTurn, kept_notes
from lightning_agentrl.prompts.parser import TolerantParser


def kept(*replies: str) -> tuple[str, ...]:
    return kept_notes(replies, 3)


def shown(memory: NotebookMemory, past: list[PastTurn]) -> list[str]:
    return memory.recall(past).note.splitlines()[1:]


FACT = st.sampled_from([f"fact {name}" for name in "abcdefg"])
REPLY = st.lists(FACT.map("note: {}".format) | FACT | st.just("go"), max_size=4).map("\n".join)


def test_lines_with_the_marker_are_notes() -> None:
    reply = "THINK: I note: nothing\nNote: the key is red\n- **NOTE:** Two  doors!\nACTION: left"
    assert kept(f"{reply}\n> note : a hole\nkeynote: no") == ("the key is red", "Two doors!", "a hole")
    assert kept("note:", "note: ...", "note: **") == ()


def test_a_note_does_not_hide_the_action() -> None:
    actions = ["left", "right"]
    for reply in ("THINK: a\nACTION: left\nnote: turn right later", "left\nnote: turn right later"):
        assert TolerantParser().parse(reply, actions, {}).action == "left"


def test_a_long_note_is_cut_after_a_word() -> None:
    whole = "a fact " * 16 + "of words"  # 120 characters
    assert kept(f"note: {whole}") == kept(f"note: {whole} that are many") == (whole,)
    assert kept(f"note: {whole}, many") == (whole.removesuffix(" words"),)
    assert kept("note: " + "abc" * 99) == ("abc" * 40,)


def test_the_least_used_goes_first() -> None:
    three = "note: a\nnote: b\nnote: c"
    assert kept(three, "note: d") == ("b", "c", "d")  # none used: the oldest
    assert kept(three, "note: A.", "note: d") == ("a", "c", "d")  # renewed, in another writing
    assert kept(three, "I think of A, and b", "note: d") == ("a", "b", "d")  # named again
    assert kept(three, "a b c", "b c", "note: d", "note: e") == ("b", "c", "e")  # more often counts more
    assert kept(three, "c", "b", "a", "note: d") == ("a", "b", "d")  # equally often: the longest ago
    assert kept(three, "abc cab", "note: d") == ("b", "c", "d")  # parts of words do not count
    assert kept("note: a\nnote: b\nnote: c\nnote: d") == ("b", "c", "d")


@given(st.lists(REPLY, max_size=30), st.integers(1, 4))
def test_notes_are_bounded_and_were_written(replies, notes) -> None:
    left = kept_notes(replies, notes)
    assert len(left) <= notes
    assert len(set(left)) == len(left)
    written = [line.removeprefix("note: ") for reply in replies for line in reply.split("\n") if "note: " in line]
    assert set(left) <= set(written)
    if written:
        assert written[-1] in left, "the newest is always there"


@given(st.lists(REPLY, max_size=30))
def test_with_room_for_all_nothing_is_lost_and_the_order_is_that_of_writing(replies) -> None:
    written = [line.removeprefix("note: ") for reply in replies for line in reply.split("\n") if "note: " in line]
    assert kept_notes(replies, 7) == tuple(dict.fromkeys(written))


@given(st.lists(REPLY, min_size=1, max_size=30), st.integers(1, 3))
def test_a_note_that_every_reply_names_stays(replies, notes) -> None:
    named = ["note: the way out", *(f"{reply}\nthe way out" for reply in replies)]
    if notes > 1:
        assert "the way out" in kept_notes(named, notes)
    assert kept_notes(named, notes) == kept_notes(list(named), notes)


@settings(max_examples=15)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_reply_can_be_read(reply, fact) -> None:
    for text in kept_notes([reply, f"note: {fact}"], 2):
        assert 0 < len(text) <= 120
        assert "\n" not in text


@pytest.mark.slow
def test_long_replies_are_not_kept_for_the_length_of_a_run() -> None:
    tracemalloc.start()
    try:
        for number in range(20):
            assert kept_notes([f"note: fact {number}\n" + "on and on " * 20_000], 8) == (f"fact {number}",)
        assert tracemalloc.get_traced_memory()[0] < 2e6  # of which one has 200 kilobytes
    finally:
        tracemalloc.stop()


def test_a_prompt_shows_notes_of_the_whole_episode_and_the_last_turns() -> None:
    memory = NotebookMemory(notes=2, turns=1)
    past = [PastTurn(f"room {i}", f"idea {i}", f"act {i}", f"act {i}\nnote: door {i}") for i in range(5)]
    assert shown(memory, []) == ["- none yet"]
    assert "'note: a fact'" in memory.recall([]).note
    assert shown(memory, past) == ["- door 3", "- door 4"]
    assert memory.recall(past).turns == (past[-1],)
    assert NotebookMemory(turns=0).recall(past).turns == ()
    other = [replace(turn, observation="", thought="", action="") for turn in past]
    assert shown(memory, other) == shown(memory, past), "only what the model wrote counts"


@pytest.mark.parametrize(("notes", "turns"), [(1, 0), (3, 2), (8, 1)])
def test_the_fullest_past_fills_the_notebook(notes, turns) -> None:
    memory = NotebookMemory(notes, turns)
    past = memory.fullest(PastTurn("a room", "", "go"))
    lines = shown(memory, past)
    assert len(lines) == notes
    assert len(memory.recall(past).turns) == turns
    assert all(72 <= len(line) - 2 <= 120 for line in lines)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"notes": 0}, "notes must be at least 1, got 0"),
        ({"turns": -1}, "turns must be at least 0, got -1"),
    ],
)
def test_wrong_arguments(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        NotebookMemory(**kwargs)
