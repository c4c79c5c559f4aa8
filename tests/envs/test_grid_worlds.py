"""Worlds of cells: seen and told from one table, rewards by step, and shaping that leaves the best play as it is."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_envs import baselines
from agentrl_envs.frozen_lake.env import FrozenLake
from agentrl_envs.frozen_lake.lake import Lake, draw_lake
from agentrl_envs.grids.world import MOVES, World, potential, shortest, step_reward
from agentrl_envs.pictures import draw_grid
from agentrl_envs.sokoban.env import Sokoban
from agentrl_envs.sokoban.level import Level

IDS = ("GridWorldImage-v0", "GridWorldImage-Boxes-v0")
LAKE = Lake(3, frozenset({(0, 1), (2, 0)}), goal=(2, 2), player=(0, 0))


def make(env_id: str, **kwargs) -> FrozenLake | Sokoban:
    return gymnasium.make(f"agentrl_envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def reachable(world: World) -> Iterator[World]:
    """All states that play leads to, without those behind an end."""
    seen, todo = {world}, [world]
    while todo:
        here = todo.pop()
        yield here
        if not (here.solved or here.lost):
            new = {here.after(action) for action in MOVES} - seen
            seen |= new
            todo += sorted(new, key=repr)


@pytest.mark.parametrize("env_id", IDS)
def test_text_image_and_both_play_the_same_game(env_id) -> None:
    envs = [make(env_id, observation=kind) for kind in ("text", "image", "both")]
    random = np.random.default_rng(0)
    for seed in range(5):
        text, image, both = [env.reset(seed=seed)[0] for env in envs]
        over = False
        while not over:
            assert both["text"] == text
            assert "P" in text or "S" in text
            assert "_" not in image["text"]
            assert [picture.tobytes() for picture in both["images"]] == [image["images"][0].tobytes()]
            for env, seen in zip(envs, (text, image, both), strict=True):
                assert env.observation_space.contains(seen)
            action = str(random.choice([*MOVES, "dance"], p=[0.2] * 5))
            answers = [env.step(action) for env in envs]
            assert answers[0][1:4] == answers[1][1:4] == answers[2][1:4]
            text, image, both = [answer[0] for answer in answers]
            unknown = action == "dance"
            assert [("no action" in words) for words in (text, image["text"], both["text"])] == [unknown] * 3
            over = answers[0][2] or answers[0][3]


@pytest.mark.parametrize("env_id", IDS)
def test_the_gymnasium_checker_accepts(env_id) -> None:
    check_env(make(env_id), skip_render_check=True)


@pytest.mark.parametrize("cell_px", [16, 28, 32])
@pytest.mark.parametrize("env_id", IDS)
def test_a_picture_is_made_of_one_square_for_each_cell_and_shows_the_state(env_id, cell_px) -> None:
    env = make(env_id, cell_px=cell_px)
    env.reset(seed=1)
    states = {}
    for world in list(reachable(env._world))[:60]:
        env._world = world
        (picture,) = env._images()
        rows = env._rows()
        assert picture.shape == (len(rows) * cell_px, len(rows) * cell_px, 3)
        assert env.observation_space["images"].contains((picture,))
        states[picture.tobytes()] = world
        for y, row in enumerate(rows):
            for x, symbol in enumerate(row):
                cell = picture[y * cell_px : (y + 1) * cell_px, x * cell_px : (x + 1) * cell_px]
                assert (cell == draw_grid([[symbol]], env._looks, cell_px)).all()
    assert len(states) == min(len(list(reachable(env._world))), 60) or env_id == IDS[1]
    looks = {symbol: draw_grid([[symbol]], env._looks, cell_px).tobytes() for symbol in env._looks}
    assert len(set(looks.values())) == len(looks)


def test_rewards_by_step() -> None:
    env = FrozenLake(size=3, reward="steps", observation="image")
    rewards = {}
    for name, actions in {"goal": "down right right down", "hole": "down down", "edge": "up", "lost": "dance"}.items():
        env.reset(seed=0)
        env._world = LAKE
        turns = [env.step(action) for action in actions.split()]
        rewards[name] = [(round(turn[1], 9), turn[2]) for turn in turns]
    assert rewards == {
        "goal": [(-0.01, False)] * 3 + [(1.0, True)],
        "hole": [(-0.01, False), (0.0, True)],
        "edge": [(-0.01, False)],
        "lost": [(-0.06, False)],
    }
    room = Sokoban(size=5, reward="steps")
    room.reset(seed=0)
    room._world = Level(5, frozenset({(2, 1)}), frozenset({(1, 2)}), (1, 3))
    *_, info = answer = room.step("left")  # into the corner
    assert answer[1:4] == (0.0, True, False)
    assert not info["success"]


def best_policies(start: World, discount: float, taken_back: float | None) -> dict[World, tuple[str, ...]]:
    """The best actions of every state by value iteration, ties within 1e-9.

    Args:
        start: the first state.
        discount: of the game.
        taken_back: how much of the potential before a turn is taken from its reward; None: no shaping.
    """
    states = [world for world in reachable(start) if not (world.solved or world.lost)]
    near = {world: potential(world, 16) for world in reachable(start)}
    places = {world: number for number, world in enumerate(states)}
    after = np.array([[places.get(world.after(action), len(states)) for action in MOVES] for world in states])
    rewards = np.array([[step_reward(world.after(action)) for action in MOVES] for world in states])
    if taken_back is not None:
        gained = [[discount * near[world.after(action)] for action in MOVES] for world in states]
        rewards += np.array(gained) - taken_back * np.array([[near[world]] for world in states])
    values = np.zeros(len(states) + 1)  # the last one: behind every end
    for _ in range(500):
        worth = rewards + discount * values[after]
        values[:-1] = worth.max(1)
    best = worth > values[:-1, None] - 1e-9
    return {world: tuple(np.array(list(MOVES))[row]) for world, row in zip(states, best, strict=True)}


@pytest.mark.parametrize("discount", [0.5, 0.95, 0.99])
def test_shaping_leaves_the_best_policies_as_they_are(discount) -> None:
    for seed in range(4):
        lake = draw_lake(np.random.default_rng(seed), 4, 0.7, "random", 16, (2, 4))
        plain = best_policies(lake, discount, None)
        assert best_policies(lake, discount, 1.0) == plain
        ways = {world: shortest(world) for world in plain}
        assert all(actions == ways[world].first for world, actions in plain.items() if ways[world] is not None)
    assert best_policies(lake, 0.95, 0.0) != plain  # nearness that is not taken back is worth more than the goal


@settings(deadline=None, max_examples=25)
@given(actions=st.lists(st.sampled_from(list(MOVES)), min_size=1, max_size=12), discount=st.floats(0.1, 1))
def test_shaping_adds_the_potential_of_the_last_state_and_takes_that_of_the_first(actions, discount) -> None:
    envs = [FrozenLake(size=3, reward="steps", shaping=shaping) for shaping in (None, discount)]
    returns = [0.0, 0.0]
    for number, env in enumerate(envs):
        env.reset(seed=0)
        env._world = LAKE
        for turn, action in enumerate(actions):
            _, reward, terminated, _, _ = env.step(action)
            returns[number] += discount**turn * reward
            if terminated:
                break
    difference = discount ** (turn + 1) * potential(envs[1]._world, 12) - potential(LAKE, 12)
    assert returns[1] - returns[0] == pytest.approx(difference, abs=1e-9)


def test_the_best_moves_are_all_moves_that_come_nearer() -> None:
    for seed in range(20):
        lake = draw_lake(np.random.default_rng(seed), 4, 0.7, "random", 16)
        for world in reachable(lake):
            way = shortest(world)
            if way is None or world.solved or world.lost:
                continue
            after = {action: shortest(world.after(action)) for action in MOVES if not world.after(action).lost}
            nearer = tuple(action for action, left in after.items() if left and left.length == way.length - 1)
            assert way.first == nearer


def test_maps_keep_what_is_asked_of_them() -> None:
    env = make("GridWorldImage-v0")
    counts = set()
    for seed in range(40):
        env.reset(seed=seed)
        counts.add(len(env._world.holes))
        way = shortest(env._world)
        assert way is not None
        assert 2 <= way.length <= 16
        assert env.best_actions() == way.first
    assert counts == {2, 3, 4}


@pytest.mark.parametrize("env_id", IDS)
def test_the_scripted_player_wins_every_map(env_id) -> None:
    assert baselines.solver_agent(env_id, range(50)).success == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "band"), [(IDS[0], 0.165), (IDS[1], 0.28)])
def test_random_play_succeeds_as_often_as_it_is_known_to(env_id, band) -> None:
    assert baselines.random_agent(env_id, range(1500)).success == pytest.approx(band, abs=0.03)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"observation": "picture"}, "not 'picture'"),
        ({"cell_px": 7}, "8 to 128, not 7"),
        ({"cell_px": 32.0}, "not 32.0"),
        ({"shaping": 0.9}, 'beside "binary"'),
        ({"shaping": 1.1, "reward": "steps"}, "at most 1"),
        ({"shaping": float("nan"), "reward": "steps"}, "not nan"),
    ],
)
def test_wrong_arguments(kwargs, sentence) -> None:
    for env in (FrozenLake, Sokoban):
        with pytest.raises(ValueError, match=sentence):
            env(**kwargs)
