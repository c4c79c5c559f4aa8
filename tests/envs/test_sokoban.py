"""Sokoban: pushes, symbols, rewards, and that every level can be solved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_envs import baselines
from agentrl_envs.grids.world import MOVES, shortest
from agentrl_envs.sokoban.env import Sokoban
from agentrl_envs.sokoban.level import Level, draw_level


def room(text: str) -> Level:
    """The level of a drawing."""
    cells = {(y, x): symbol for y, row in enumerate(text.split("\n")) for x, symbol in enumerate(row.split())}

    def having(symbols: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    (player,) = having("PS")
    return Level(len(text.split("\n")), having("O*S"), having("X*"), player)


def in_the_room(text: str, **kwargs) -> Sokoban:
    level = room(text)
    env = Sokoban(size=level.size, boxes=len(level.boxes), render_mode="rgb_array", **kwargs)
    env.reset(seed=0)
    env._world = level
    assert env._observe()[0] == text
    return env


ONE = "# # # # #\n# P X O #\n# _ _ _ #\n# _ _ _ #\n# # # # #"


def test_a_push_solves() -> None:
    env = in_the_room(ONE)
    text, reward, terminated, truncated, info = env.step("push right")
    assert text == "# # # # #\n# _ P * #\n# _ _ _ #\n# _ _ _ #\n# # # # #"
    assert (reward, terminated, truncated, info["success"], info["progression"]) == (1.0, True, False, True, 1.0)


def test_walls_and_boxes_hold_back_and_a_corner_is_the_end_of_a_box() -> None:
    env = in_the_room("# # # # # #\n# P X X _ #\n# _ _ _ _ #\n# _ _ _ _ #\n# O O _ _ #\n# # # # # #")
    before = env._observe()[0]
    for action in ("up", "left", "right"):  # wall, wall, two boxes in a row
        text, reward, terminated, _, info = env.step(action)
        assert (text, reward, terminated, info["progression"], info["metrics"]) == (
            before,
            0.0,
            False,
            0.0,
            {"stuck": 1},  # two boxes at a wall with no target
        )
    env = in_the_room("# # # # #\n# _ X P #\n# _ O _ #\n# _ _ _ #\n# # # # #")
    *_, info = env.step("left")
    assert info["metrics"] == {"stuck": 1}
    assert shortest(env._world) is None
    assert env.solver()() == "up"


def test_classic_rewards_and_the_player_on_a_target() -> None:
    env = in_the_room("# # # # #\n# _ _ _ #\n# P * O #\n# _ X _ #\n# # # # #", reward="classic")
    rewards = []
    for action in ("right", "right", "left"):  # from one target to the other; the wall holds; back
        text, reward, *_ = env.step(action)
        rewards.append(reward)
    assert rewards == pytest.approx([-0.1, -0.1, -0.1])
    assert text == "# # # # #\n# _ _ _ #\n# P O * #\n# _ X _ #\n# # # # #"
    env = in_the_room(ONE, reward="classic")
    assert env.step("right")[1] == pytest.approx(10.9)
    env = in_the_room("# # # # #\n# _ _ _ #\n# P * _ #\n# _ X O #\n# # # # #", reward="classic")
    text, reward, *_ = env.step("right")
    assert reward == pytest.approx(-1.1)
    assert text == "# # # # #\n# _ _ _ #\n# _ S X #\n# _ X O #\n# # # # #"


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), size=st.integers(5, 7), boxes=st.integers(1, 2), pulls=st.integers(1, 12))
def test_every_level_is_unsolved_and_its_solution_solves_it(seed, size, boxes, pulls) -> None:
    limit = Sokoban(size, boxes, pulls).max_turns
    level = draw_level(np.random.default_rng(seed), size, boxes, pulls, limit)
    assert not level.solved
    assert len(level.boxes) == len(level.targets) == boxes
    assert level.player not in level.boxes
    way = shortest(level)
    assert way is not None
    assert 0 < way.length <= limit
    while way.length:
        level = level.after(way.first[0])
        way = shortest(level)
        assert way is not None
    assert level.solved


def test_a_lost_box_is_one_that_no_play_can_save() -> None:
    inner = [(row, column) for row in range(1, 5) for column in range(1, 5)]
    for target in ((1, 1), (1, 2), (2, 2)):
        for box, player in itertools.permutations(inner, 2):
            level = Level(6, frozenset({target}), frozenset({box}), player)
            assert level.lost == (not solvable(level))


def solvable(level: Level) -> bool:
    """Whether any play solves a level, tried without leaving out those that seem lost."""
    seen, todo = {level}, [level]
    while todo and not todo[-1].solved:
        new = {todo[-1].after(action) for action in MOVES} - seen
        todo.pop()
        seen |= new
        todo += new
    return bool(todo)


@given(st.lists(st.sampled_from(list(MOVES)), max_size=30))
def test_no_move_loses_a_box_or_enters_a_wall(actions) -> None:
    level = room("# # # # # #\n# _ _ _ _ #\n# _ X X _ #\n# _ _ P _ #\n# O _ _ O #\n# # # # # #")
    for action in actions:
        level = level.after(action)
        cells = {*level.boxes, level.player}
        assert len(cells) == 3
        assert all(1 <= place <= 4 for cell in cells for place in cell)


def test_a_picture() -> None:
    env = in_the_room(ONE)
    first = env.render()
    assert first is not None
    assert (first.shape, first.dtype) == ((160, 160, 3), np.uint8)
    env.step("right")
    assert (first != env.render()).any()


def test_the_scripted_player_wins_200_levels() -> None:
    assert baselines.solver_agent("SokobanText-v0", range(200)).success == 1.0


@pytest.mark.slow
def test_the_scripted_player_wins_levels_with_more_boxes() -> None:
    assert baselines.solver_agent("SokobanText-v0", range(60), size=6, boxes=2, pulls=12).success == 1.0
    assert baselines.solver_agent("SokobanText-v0", range(200), size=5).success == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("size", "band"), [(5, 0.49), (6, 0.29)])
def test_random_play_succeeds_as_often_as_it_is_known_to(size, band) -> None:
    assert baselines.random_agent("SokobanText-v0", range(1500), size=size).success == pytest.approx(band, abs=0.04)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"size": 4}, "5 to 10, not 4"),
        ({"boxes": 0}, "1 to 3 boxes, not 0"),
        ({"pulls": 0}, "1 to 10000, not 0"),
        ({"reward": "dense"}, "not 'dense'"),
        ({"render_mode": "human"}, "not 'human'"),
    ],
)
def test_wrong_arguments(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sokoban(**kwargs)
