"""Golden texts of hand-built views of Crafter."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl_envs.crafter import describe

WATER, GRASS, STONE, TREE, TABLE, PLAYER, COW = 1, 2, 3, 6, 11, 13, 14
FULL = {"health": 9, "food": 9, "drink": 9, "energy": 9, "sapling": 0, "wood": 0, "wood_pickaxe": 0}
FRESH = "Your status:\n- health: 9/9\n- food: 9/9\n- drink: 9/9\n- energy: 9/9\n\nYour inventory is empty."


def window(cells: dict[tuple[int, int], int], fill: int = -1) -> list[list[int]]:
    """Keys are (steps to the east, steps to the south); the player is in the middle."""
    rows = [[fill] * 9 for _ in range(7)]
    for (east, south), code in {(0, 0): PLAYER, **cells}.items():
        rows[3 + south][4 + east] = code
    return rows


@pytest.mark.parametrize(
    ("cells", "fill", "lines"),
    [
        pytest.param({}, -1, ["There is nothing around you."], id="outside the map there is nothing"),
        pytest.param(
            {(1, 0): TREE}, GRASS, ["You see:", "- grass 1 step to your west", "- tree 1 step to your east"], id="one"
        ),
        pytest.param(
            {(-2, 1): WATER, (4, -3): STONE, (0, 3): COW},
            -1,
            [
                "You see:",
                "- water 3 steps to your south-west",
                "- cow 3 steps to your south",
                "- stone 7 steps to your north-east",
            ],
            id="types from west to east",
        ),
        pytest.param(
            {(2, 2): TREE, (2, -2): WATER},
            -1,
            ["You see:", "- water 4 steps to your north-east", "- tree 4 steps to your south-east"],
            id="in a column from north to south",
        ),
        pytest.param(
            {(-2, 0): TREE, (0, -2): TREE, (1, 1): TREE, (2, 0): TREE},
            -1,
            ["You see:", "- tree 2 steps to your west"],
            id="of a tie, the first that is met",
        ),
        pytest.param(
            {(-3, 0): TREE, (-1, 0): STONE, (0, 1): TREE},
            -1,
            ["You see:", "- tree 1 step to your south", "- stone 1 step to your west"],
            id="a nearer one takes the place of the first",
        ),
        pytest.param(
            {(4, 3): TABLE}, -1, ["You see:", "- table 7 steps to your south-east"], id="the corner of the window"
        ),
        pytest.param({(2, 0): PLAYER}, -1, ["You see:", "- player 2 steps to your east"], id="another player"),
    ],
)
def test_surroundings(cells: dict[tuple[int, int], int], fill: int, lines: list[str]) -> None:
    long_term, short_term = describe(window(cells, fill), (0, -1), FULL)
    ahead = "grass" if fill == GRASS else "nothing"
    assert long_term == "\n".join([*lines, "", f"You face {ahead} at your front."])
    assert short_term == FRESH


@pytest.mark.parametrize(
    ("facing", "name"), [((0, 1), "cow"), ((1, 0), "tree"), ((-1, 0), "nothing"), (COW, "cow"), (np.uint8(3), "stone")]
)
def test_what_is_ahead(facing: tuple[int, int] | int, name: str) -> None:
    long_term, _ = describe(np.array(window({(0, 1): COW, (1, 0): TREE})), facing, FULL)
    assert long_term.splitlines()[-2:] == ["", f"You face {name} at your front."]


def test_asleep_and_dead_come_first() -> None:
    awake, status = describe(window({}), (0, 1), FULL)
    asleep = describe(window({}), (0, 1), FULL, sleeping=True)
    dead = describe(window({}), (0, 1), FULL, sleeping=True, dead=True)
    assert asleep == (f"You are asleep, and no action has an effect until your energy is full.\n\n{awake}", status)
    assert dead == (f"You died.\n\n{awake}", status)


def test_inventory() -> None:
    held = {**FULL, "health": 0, "energy": 3, "sapling": 1, "wood_pickaxe": 2}
    lines = describe(window({}), (0, 1), held)[1].splitlines()
    assert lines == [
        *("Your status:", "- health: 0/9", "- food: 9/9", "- drink: 9/9", "- energy: 3/9"),
        *("", "Your inventory:", "- sapling: 1", "- wood_pickaxe: 2"),
    ]


@pytest.mark.parametrize(
    ("view", "named"),
    [(window({})[:-1], "7 rows"), ([row[:-1] for row in window({})], "9 cells"), (window({(1, 1): 19}), "19")],
)
def test_a_window_that_is_none_is_refused(view: list[list[int]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        describe(view, (0, 1), FULL)
