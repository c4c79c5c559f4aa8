"""Golden texts of hand-built views."""

import numpy as np
import pytest

from agentrl_envs.babyai.text import describe_view

WALL = (2, 5, 0)
EMPTY = (1, 0, 0)
COLUMN, ROW = 3, 6  # the agent's cell


def view(cells: dict[tuple[int, int], tuple[int, int, int]], fill=EMPTY) -> np.ndarray:
    """A 7x7 view; keys are (steps to the right, steps ahead)."""
    grid = np.zeros((7, 7, 3), dtype=np.uint8)
    grid[:, :] = fill
    for (right, ahead), cell in cells.items():
        grid[COLUMN + right, ROW - ahead] = cell
    return grid


RED_BALL, GREEN_BOX, BLUE_KEY, GREY_KEY = (6, 0, 0), (7, 1, 0), (5, 2, 0), (5, 5, 0)


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param(
            {(0, 3): WALL, (-1, 0): WALL, (2, 0): WALL},
            ["a wall 3 steps forward", "a wall 1 step left", "a wall 2 steps right"],
            id="walls forward, left, right",
        ),
        pytest.param({(1, 2): WALL, (-2, 1): WALL}, [], id="walls off the three lines are never told"),
        pytest.param({(0, 6): WALL, (0, 5): WALL}, ["a wall 5 steps forward"], id="the nearer wall"),
        pytest.param({(0, 2): RED_BALL, (0, 4): WALL}, ["a red ball 2 steps forward"], id="wall behind an object"),
        pytest.param(
            {(-1, 0): GREEN_BOX, (-3, 0): WALL, (1, 0): WALL},
            ["a wall 1 step right", "a green box 1 step left"],
            id="object at 0 forward hides the wall behind it",
        ),
        pytest.param({(0, 0): BLUE_KEY}, ["You carry a blue key"], id="carried"),
        pytest.param(
            {(0, 0): BLUE_KEY, (0, 1): WALL, (1, 4): RED_BALL},
            ["You carry a blue key", "a wall 1 step forward", "a red ball 1 step right and 4 steps forward"],
            id="carried comes first, walls before things",
        ),
        pytest.param(
            {(0, 1): (4, 4, 2), (0, 2): WALL}, ["a locked yellow door 1 step forward"], id="locked door hides wall"
        ),
        pytest.param(
            {(0, 1): (4, 3, 0), (0, 5): WALL}, ["a open purple door 1 step forward"], id="open door, published grammar"
        ),
        pytest.param({(-3, 1): (4, 2, 1)}, ["a closed blue door 3 steps left and 1 step forward"], id="closed door"),
        pytest.param(
            {(2, 0): RED_BALL, (-2, 3): GREEN_BOX, (-2, 5): BLUE_KEY, (0, 1): GREY_KEY},
            [
                "a blue key 2 steps left and 5 steps forward",
                "a green box 2 steps left and 3 steps forward",
                "a grey key 1 step forward",
                "a red ball 2 steps right",
            ],
            id="columns from the left, far before near",
        ),
        pytest.param(
            {(1, 1): (8, 1, 0), (0, 2): (9, 0, 0), (0, 4): WALL},
            ["a red lava 2 steps forward", "a green goal 1 step right and 1 step forward"],
            id="goal and lava",
        ),
    ],
)
def test_golden(cells, lines):
    assert describe_view(view(cells)) == lines


def test_walls_are_seen_across_unseen_cells():
    grid = view({(0, 4): WALL}, fill=(0, 0, 0))
    assert describe_view(grid) == ["a wall 4 steps forward"]


def test_other_view_sizes():
    grid = np.zeros((5, 5, 3), dtype=np.uint8)
    grid[2, 0] = WALL
    grid[4, 4] = RED_BALL
    assert describe_view(grid) == ["a wall 4 steps forward", "a red ball 2 steps right"]
