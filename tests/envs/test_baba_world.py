"""The world of Baba Is AI: rules, moves, pushes, stacks and ends, on maps built by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_envs.baba.elements import BORDER, MAX_SIDE
from agentrl_envs.baba.rules import read_rules
from agentrl_envs.baba.text import active_rules, describe
from agentrl_envs.baba.world import MOVES, World

# A short hand: in tests, rows are written with these words between blanks.
SHORT = {
    "#": "border",
    "B": "obj:baba",
    "W": "obj:wall",
    "o": "obj:ball:red",
    "O": "obj:ball:blue",
    "k": "obj:key:green",
    "D": "obj:door:red",
    "IS": "text:is",
    **{noun.upper(): f"text:noun:{noun}" for noun in ("baba", "wall", "ball", "key", "door")},
    **{word.upper(): f"text:prop:{word}" for word in ("you", "win", "lose", "stop", "push")},
    **{word.upper(): f"text:color:{word}" for word in ("red", "blue")},
}
LONG = {long: short for short, long in SHORT.items()}


def world(*rows: str) -> World:
    cells = [["+".join(SHORT.get(name, name) for name in cell.split("+")) for cell in row.split()] for row in rows]
    return World.read("\n".join(" ".join(row) for row in cells))


def rows(state: World) -> list[str]:
    """The map in short hand."""
    return [
        " ".join("+".join(LONG.get(name, name) for name in cell.split("+")) for cell in line.split())
        for line in state.write().splitlines()
    ]


def blocks(state: World) -> list[tuple[int, str]]:
    return [(cell, element.name) for cell, stack in enumerate(state.cells) for element in stack if element.is_text]


def play(state: World, *moves: str) -> tuple[World, list[str]]:
    outcomes = []
    for move in moves:
        state, outcome = state.after(move)
        outcomes.append(outcome)
    return state, outcomes


YOU = "BABA IS YOU . . ."


# ---- rules -------------------------------------------------------------------------------------------------------


def test_rules_are_read_along_rows_then_columns_in_the_order_of_the_is():
    state = world(
        "BABA IS  YOU  .    RED",
        ".    BALL .   .    KEY",
        "WALL IS  STOP .    IS",
        ".    WIN .    B    PUSH",
    )
    assert active_rules(state) == ["baba is you", "wall is stop", "ball is win", "red key is push"]


@pytest.mark.parametrize(
    "row",
    [
        "IS WIN BALL .",
        "BALL IS . WIN",
        "BALL IS+o WIN .",  # covered: only what is on top is read
        "WIN IS BALL .",
        "RED IS WIN .",
        "BALL IS RED .",
        "BALL IS IS .",
        "o IS WIN .",
    ],
)
def test_what_is_no_rule(row):
    assert active_rules(world("BABA IS YOU B", row)) == ["baba is you"]


def test_a_colour_before_the_noun_restricts_the_rule_to_it():
    state = world("RED BALL IS YOU", "BLUE BALL IS WIN", "o   .    O  .")
    assert active_rules(state) == ["red ball is you", "blue ball is win"]
    state, outcomes = play(state, "right", "right")
    assert outcomes == ["", "win"]
    state = world("RED BALL IS STOP", "BABA IS YOU .", "o B O .")
    assert rows(state.after("left")[0])[2] == "o B O ."
    assert rows(state.after("right")[0])[2] == "o . O+B ."


def test_a_block_on_which_nothing_stands_any_more_is_read_again():
    state, _ = play(world("BABA IS YOU .", "WALL IS STOP+B ."), "right")
    assert active_rules(state) == ["baba is you", "wall is stop"]


# ---- moves -------------------------------------------------------------------------------------------------------


def test_a_chain_of_three_blocks_moves_together_and_not_at_all_against_the_border():
    state = world("BABA IS YOU . . . .", "B WIN LOSE IS . # .")
    state, _ = play(state, "right")
    assert rows(state)[1] == ". B WIN LOSE IS # ."
    again, _ = play(state, "right")
    assert again.cells == state.cells


def test_rules_at_the_border_cannot_be_pushed():
    state = world("# # # # # #", "# WALL IS STOP . #", "# . B . . #", "# BABA IS YOU . #", "# # # # # #")
    for moves in (("up",), ("down",), ("left", "up"), ("left", "down"), ("right", "right", "up", "left")):
        after, _ = play(state, *moves)
        assert active_rules(after) == ["wall is stop", "baba is you"]
        assert blocks(after) == blocks(state)


def test_walls_stop_only_while_the_rule_stands():
    state = world(YOU, "WALL IS STOP . . .", ". . B W . .")
    assert play(state, "right")[0].cells == state.cells
    state = world("BABA IS YOU . .", ". . . . .", "WALL IS STOP . .", ". . B W .")
    state, _ = play(state, "up")
    assert active_rules(state) == ["baba is you"]
    state, _ = play(state, "right", "down")
    assert rows(state)[1:] == [". . STOP . .", "WALL IS . . .", ". . . W+B ."]


def test_things_lie_on_each_other_and_only_the_top_counts():
    state = world(YOU, "KEY IS STOP . . .", ". B k+o o k .")
    state, _ = play(state, "right", "right", "right")
    assert rows(state)[2] == ". . k+o o+B k ."


def test_a_block_can_be_pushed_onto_a_thing():
    state, _ = play(world(YOU, "B WIN o . . ."), "right")
    assert rows(state)[1] == ". B o+WIN . . ."


def test_things_that_are_push_are_pushed_and_walked_onto_where_they_cannot_move():
    state = world("BABA IS YOU .", "BALL IS PUSH .", "B o . #")
    state, _ = play(state, "right")
    assert rows(state)[2] == ". B o #"
    state, _ = play(state, "right")
    assert rows(state)[2] == ". . o+B #"


def test_several_you_move_once_each():
    state = world("BABA IS YOU . . .", "BALL IS YOU . . .", "BALL IS PUSH . . .", "B o o . . .", "o . . . . B")
    state, outcomes = play(state, "right")
    assert rows(state)[3:] == [". B o o . .", ". o . . . B"]
    assert outcomes == [""]
    state, _ = play(state, "down", "left")
    assert rows(state)[3:] == [". . . . . .", "B+o o o . B ."]


def test_a_you_that_a_push_lays_bare_moves_in_the_same_step():
    # The second baba lies below a block that the first one pushes away. What then lies on top stops the first one.
    state = world("BABA IS YOU . .", "KEY IS STOP . .", "B B+k+LOSE . . .")
    state, _ = play(state, "right")
    assert rows(state)[2] == "B B+k LOSE . ."
    state = world("BABA IS YOU . . .", "BABA IS STOP . . .", "B B+LOSE . . . .")
    state, _ = play(state, "right")
    assert rows(state)[2] == "B . B LOSE . ."
    # Backwards it lies in a cell that had its turn, as does what the first one stood on.
    state, _ = play(world("BABA IS YOU .", ". . B+LOSE B+B"), "left")
    assert rows(state)[1] == ". LOSE B+B B"


# ---- ends --------------------------------------------------------------------------------------------------------


def test_walking_onto_what_wins_wins_by_the_rules_before_the_move():
    # Going down takes the noun out of the rule and lands on the ball below it, which was WIN until now.
    state = world("BABA IS YOU . .", "B . . . .", "o+BALL IS WIN . .", ". . . . .")
    after, outcome = state.after("down")
    assert outcome == "win"
    assert active_rules(after) == ["baba is you"]


def test_a_rule_made_by_the_move_does_not_judge_what_it_walked_onto():
    state = world("BABA IS YOU . .", "B . . . .", "o+BALL . . . .", ". IS WIN . .")
    after, outcome = state.after("down")
    assert active_rules(after) == ["baba is you", "ball is win"]
    assert outcome == ""


def test_losing_and_winning_at_once_is_a_win():
    rules = ("BALL IS WIN . .", "KEY IS LOSE . .", "BABA IS YOU . .")
    assert play(world(*rules, "B k . . ."), "right")[1] == ["lose"]
    assert play(world(*rules, "B k . . .", "B o . . ."), "right")[1] == ["win"]
    assert play(world(*rules, "B o . . .", "B k . . ."), "right")[1] == ["win"]


def test_you_that_is_win_wins_and_you_that_is_lose_loses_at_the_step_whose_rules_say_so():
    for word, outcome in (("WIN", "win"), ("LOSE", "lose")):
        state = world(YOU, ". . . . . .", f"BABA IS . {word} B .")
        state, outcomes = play(state, "left")
        assert active_rules(state) == ["baba is you", f"baba is {word.lower()}"]
        assert outcomes == [outcome]


def test_no_you_left_ends_the_game():
    state, outcomes = play(world(". . . . .", "BABA IS YOU . .", ". B . . ."), "up")
    assert outcomes == ["no_you"]
    assert describe(state).startswith("Active rules:\n\nObjects on the map:\n")


# ---- noun is noun ------------------------------------------------------------------------------------------------


def test_a_thing_that_becomes_another_takes_its_place_and_keeps_its_colour():
    state = world("BABA IS YOU . . o", "BALL IS . . . .", ". . KEY . . .", ". . B . . .")
    state, _ = play(state, "up")
    assert rows(state)[0] == "BABA IS YOU . . obj:key:red"
    assert active_rules(state) == ["baba is you"]  # the text tells rules with a property only
    state = world("BABA IS YOU . . o", "BALL IS WALL . . .", "WALL IS KEY . . B")
    state, _ = play(state, "left")
    assert rows(state)[0] == "BABA IS YOU . . W"
    state, _ = play(state, "left")
    assert rows(state)[0] == "BABA IS YOU . . obj:key:red"


def test_becoming_something_that_is_not_you_ends_the_game():
    assert play(world(YOU, "BABA IS KEY . B ."), "right")[1] == ["no_you"]
    assert play(world(YOU, "BABA IS KEY . B .", "KEY IS YOU . . ."), "right")[1] == [""]


# ---- texts -------------------------------------------------------------------------------------------------------


def test_golden_text():
    state = world(
        "# # # # # # # #",
        "# KEY IS WIN . . . #",
        "# . . . . W . #",
        "# . o . B . . #",
        "# . . . . . k #",
        "# . . . D . . #",
        "# BABA IS YOU . . . #",
        "# # # # # # # #",
    )
    assert describe(state) == (
        "Active rules:\n"
        "key is win\n"
        "baba is you\n"
        "\n"
        "Objects on the map:\n"
        "rule `key` 3 steps to the left and 2 steps up\n"
        "rule `is` 2 steps to the left and 2 steps up\n"
        "rule `win` 1 step to the left and 2 steps up\n"
        "wall 1 step to the right and 1 step up\n"
        "ball 2 steps to the left\n"
        "key 2 steps to the right and 1 step down\n"
        "door 2 steps down\n"
        "rule `baba` 3 steps to the left and 3 steps down\n"
        "rule `is` 2 steps to the left and 3 steps down\n"
        "rule `you` 1 step to the left and 3 steps down"
    )


def test_places_are_told_from_the_last_rule_with_you_that_covers_something():
    two = ("BABA IS YOU .", "KEY IS YOU .", "B . . k")
    assert "key here" in describe(world(*two))
    none = ("BABA IS YOU .", "DOOR IS YOU .", "B . . k")
    assert "\nkey 3 steps to the right" in describe(world(*none))
    coloured = ("RED BALL IS YOU", "O . o .")
    assert describe(world(*coloured)).endswith("ball 2 steps to the left\nball here")


# ---- maps that cannot be read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "''"),
        ("  \n ", "text with one line per row"),
        (5, "not 5"),
        (". .\n.", "Row 2 of the map has 1 cells, but row 1 has 2"),
        (". .\n\n. .", "Row 2 of the map has 0 cells"),
        (". obj:bal:red", "Row 1, cell 2 of the map has 'obj:bal:red'"),
        (".\nobj:ball", "Row 2, cell 1 of the map has 'obj:ball'"),
        ("obj:baba+", "has ''"),
        ("obj:baba+.", "has '.'"),
        ("text:prop:pull", "the properties you, win, lose, stop, push"),
        ("border+obj:baba", "a border cell has no other element"),
        (" ".join("." * (MAX_SIDE + 1)), f"at most {MAX_SIDE} x {MAX_SIDE}"),
    ],
)
def test_a_map_that_cannot_be_read_is_answered_with_a_sentence(text, message):
    with pytest.raises(ValueError, match="map") as caught:
        World.read(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- what holds on every map -------------------------------------------------------------------------------------

CELL = st.lists(st.sampled_from([name for name in SHORT if name != "#"]), min_size=1, max_size=2).map("+".join)
ROW = st.lists(st.one_of(st.sampled_from(".#B"), CELL), min_size=5, max_size=5).map(" ".join)


def inventory(state: World) -> Counter:
    """What there is, whatever it may have become."""
    return Counter(element if element.is_text else element.kind for stack in state.cells for element in stack)


@settings(max_examples=30, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5), st.lists(st.sampled_from(list(MOVES)), max_size=8))
def test_on_any_map_nothing_is_lost_and_rules_are_what_the_map_says(drawn, moves):
    state = world("BABA IS YOU . B", *drawn)
    for move in moves:
        after, _ = state.after(move)
        assert after.rules == read_rules(after.width, after.cells)
        assert World.read(after.write()).write() == after.write()
        assert inventory(after) == inventory(state)
        assert all((BORDER in old) == (BORDER in new) for old, new in zip(state.cells, after.cells, strict=True))
        state = after
