"""FrozenLake: what the symbols say, how an episode ends, and that every lake can be crossed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_envs import baselines
from agentrl_envs.frozen_lake.env import FrozenLake
from agentrl_envs.frozen_lake.lake import Lake, draw_lake
from agentrl_envs.grids.world import shortest

LAKE = Lake(3, frozenset({(0, 1), (2, 0)}), goal=(2, 2), player=(0, 0))


def on_the_lake() -> FrozenLake:
    env = FrozenLake(size=3, render_mode="rgb_array")
    env.reset(seed=0)
    env._world = LAKE
    return env


def test_texts_and_ends() -> None:
    env = on_the_lake()
    assert env._observe()[0] == "P O _\n_ _ _\nO _ G"
    text, reward, terminated, truncated, info = env.step("left")  # against the edge
    assert (text, reward, terminated, truncated) == ("P O _\n_ _ _\nO _ G", 0.0, False, False)
    assert env.step("go down")[0] == "_ O _\nP _ _\nO _ G"
    text, reward, terminated, truncated, info = env.step("down")
    assert (text, reward, terminated, truncated) == ("_ O _\n_ _ _\nX _ G", 0.0, True, False)
    assert (info["success"], info["progression"]) == (False, 0.0)

    env = on_the_lake()
    steps = [env.step(action) for action in ("down", "right", "right", "down")]
    text, reward, terminated, truncated, info = steps[-1]
    assert (text, reward, terminated, truncated) == ("_ O _\n_ _ _\nO _ *", 1.0, True, False)
    assert info["success"]


def test_the_limit_truncates() -> None:
    env = on_the_lake()
    ends = [env.step("up")[2:4] for _ in range(12)]
    assert ends == [(False, False)] * 11 + [(False, True)]


def test_a_picture_shows_every_symbol() -> None:
    env = on_the_lake()
    first = env.render()
    assert first is not None
    assert (first.shape, first.dtype) == ((96, 96, 3), np.uint8)
    env.step("down")
    assert (first != env.render()).any()
    env.step("down")  # the player in a hole
    assert (first != env.render()).any()
    assert FrozenLake().render() is None


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 6),
    frozen=st.floats(0.5, 1),
    placement=st.sampled_from(["corners", "random"]),
)
def test_every_lake_can_be_crossed_within_the_limit(seed, size, frozen, placement) -> None:
    limit = FrozenLake(size, frozen, placement).max_turns
    lake = draw_lake(np.random.default_rng(seed), size, frozen, placement, limit)
    assert not lake.solved
    assert not lake.holes & {lake.player, lake.goal}
    way = shortest(lake)
    assert way is not None
    assert way.length <= limit
    for left in reversed(range(way.length)):
        lake = lake.after(way.first[-1])
        assert not lake.lost
        way = shortest(lake)
        assert way is not None
        assert way.length == left
    assert lake.solved


@pytest.mark.parametrize("kwargs", [{}, {"size": 3, "placement": "random"}])
def test_the_scripted_player_wins(kwargs) -> None:
    result = baselines.solver_agent("FrozenLakeText-v0", range(50), **kwargs)
    assert result.success == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "band"),
    [
        ({"size": 3}, 0.16),
        ({"size": 4}, 0.05),
        ({"size": 3, "placement": "random"}, 0.27),
        ({"size": 4, "placement": "random"}, 0.21),
    ],
)
def test_random_play_succeeds_as_often_as_it_is_known_to(kwargs, band) -> None:
    assert baselines.random_agent("FrozenLakeText-v0", range(2000), **kwargs).success == pytest.approx(band, abs=0.03)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"size": 1}, "size of 2 to 16, not 1"),
        ({"frozen": 0}, "above 0 and at most 1, not 0"),
        ({"frozen": float("nan")}, "not nan"),
        ({"placement": "left"}, "not 'left'"),
        ({"holes": [3, 2]}, r"from 0 to 14 for size 4, not \[3, 2\]"),
        ({"holes": [1, 15]}, "from 0 to 14"),
        ({"reward": "dense"}, "not 'dense'"),
        ({"render_mode": "human"}, "not 'human'"),
    ],
)
def test_wrong_arguments(kwargs, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        FrozenLake(**kwargs)


def test_a_limit_that_no_way_keeps_is_said() -> None:
    with pytest.raises(ValueError, match="none had a shortest path of 1 to 3 actions"):
        FrozenLake(size=4, max_turns=3).reset(seed=0)
