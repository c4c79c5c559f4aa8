"""The adapter for discrete actions: what comes out is what the inner environment does, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from agentrl_envs.discrete.env import Discrete
from tests.guides import importable, write_files

LEFT_RIGHT = ["left", "right"]
TAXI: dict[str, Any] = {
    "game": "Taxi-v4",
    "describe": str,
    "actions": ["south", "north", "east", "west", "pick up", "drop off"],
    "default_action": "north",
}


class Counting(gymnasium.Env):
    """Actions 3 to 5 add 0, 1 and 2; ends beyond 5, cuts itself off at exactly 5, says itself what a success is."""

    action_space = spaces.Discrete(3, start=3)
    observation_space = spaces.Discrete(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0 if options is None else options["count"]
        return self.count, {}

    def step(self, action):
        assert type(action) is int
        self.count += action - 3
        return (
            self.count,
            np.float32(1),
            np.bool_(self.count > 5),
            np.bool_(self.count == 5),
            {"is_success": self.count > 5},
        )


@pytest.fixture
def guide(tmp_path: Path) -> Iterator[Path]:
    write_files("environments.md", tmp_path)
    with importable(tmp_path):
        yield tmp_path


def counting(**kwargs: Any) -> Discrete:
    given = {"describe": str, "actions": ["stay", "one", "two"], "max_turns": 9} | kwargs
    return Discrete(f"{__name__}:Counting", **given)


def game_of(guide: Path, name: str) -> dict[str, Any]:
    config = yaml.safe_load((guide / f"{name}.yaml").read_text())
    game: dict[str, Any] = config["data"]["init_args"]["env"]
    return game


@pytest.mark.parametrize("name", ["frozen_lake", "cart_pole"])
def test_the_guides_games_are_those_of_gymnasium(guide: Path, name: str) -> None:
    given = game_of(guide, name)
    kwargs = {**given["kwargs"], "render_mode": None}
    env: Any = gymnasium.make(given["id"], **kwargs).unwrapped
    plain = gymnasium.make(kwargs["game"], **kwargs.get("game_kwargs", {}))
    describe = getattr(sys.modules["my_words"], name)
    generator = np.random.default_rng(0)
    ended = set()
    for seed in range(8):
        text, info = env.reset(seed=seed)
        observation, _ = plain.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            assert text == describe(observation)
            number = int(generator.integers(len(env.actions)))
            text, reward, terminated, truncated, info = env.step(list(env.actions)[number])
            observation, native, ends, cut, _ = plain.step(number)
            total += float(native)
            assert (reward, terminated) == (native, ends)
            assert truncated == (not ends and (cut or env.turn == env.max_turns))
            over = terminated or truncated
        ended.add((terminated, truncated))
        assert info["success"] == (total >= kwargs["solved_at"] if "solved_at" in kwargs else terminated and native > 0)
    assert ended


def test_the_own_limit_of_the_game_truncates() -> None:
    env = Discrete(**TAXI)
    assert env.max_turns == 200
    env = Discrete(**TAXI, max_turns=1000)
    env.reset(seed=0)
    ends = [env.step("north")[2:4] for _ in range(200)]
    assert ends == [(False, False)] * 199 + [(False, True)]


def test_pictures_pass_through() -> None:
    pytest.importorskip("pygame")
    env = Discrete(**TAXI, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    env.close()
    assert counting().render() is None


def test_numbers_success_and_ends_are_those_of_the_game() -> None:
    env = counting()
    assert env.reset(seed=0)[0] == "0"
    text, reward, terminated, truncated, info = env.step("TWO.")
    assert (text, reward, terminated, truncated, info["success"]) == ("2", 1.0, False, False, False)
    assert env.step("jump")[4] | {"metrics": {}} == env.step("stay")[4] | {"invalid_action": True}
    env.step("two")
    text, _, terminated, truncated, info = env.step("one")
    assert (text, terminated, truncated, info["success"]) == ("5", False, True, False)
    assert env.reset(seed=0, options={"count": 4})[0] == "4"
    text, _, terminated, truncated, info = env.step("two")
    assert (text, terminated, truncated, info["success"]) == ("6", True, False, True)
    env = counting(solved_at=2)
    env.reset(seed=0)
    assert [env.step("stay")[4]["success"] for _ in range(3)] == [False, True, True]
    env = counting(solved_at=-1, max_turns=2)
    assert env.reset(seed=0)[1]["success"] is False
    assert [env.step("stay")[4]["success"] for _ in range(2)] == [False, True]


def test_names_may_differ_in_case_alone() -> None:
    env = counting(actions=["stay", "h", "H"])
    for said, adds in (("h", 1), ("H", 2), (" H\n", 2), ("stay", 0)):
        env.reset(seed=0)
        observation, *_, info = env.step(said)
        assert (observation, info["executed_action"]) == (str(adds), said.strip())


def test_equal_seeds_give_equal_episodes_also_without_a_seed() -> None:
    def numbers() -> list[str]:
        env = Discrete("CartPole-v1", describe=repr, actions=LEFT_RIGHT)
        return [env.reset(seed=4)[0], env.reset()[0], env.reset()[0]]

    assert numbers() == numbers()
    assert len(set(numbers())) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"game": "CartPole-v1", "actions": ["left"]}, "has 2 actions, and 1 names"),
        ({"game": "CartPole-v1", "actions": ["left", "left"]}, "a name twice"),
        ({"game": "MountainCarContinuous-v0"}, "only those of a Discrete space"),
        ({"game": "CartPole-v1", "describe": "cart_pole"}, "module:function"),
        ({"game": "CartPole-v1", "describe": "no_such_module:cart_pole"}, "no_such_module"),
        ({"game": "CartPole-v1", "describe": "json:cart_pole"}, "json has no function cart_pole"),
        ({"game": "CartPole-v1", "actions": "ab"}, "list of names, or names and descriptions, not 'ab'"),
        ({"game": "CartPole-v1", "actions": [True, False]}, r"must be texts, not \[True, False\]; put them in quotes"),
        ({"game": "CartPole-v1", "actions": None}, "list of names, or names and descriptions, not None"),
        ({"game": "FrozenLake-v1", "game_kwargs": {"map_name": "9x9"}}, r"cannot be created: KeyError\('9x9'\)"),
        ({"game": "CartPole-v1", "solved_at": float("nan")}, "solved_at must be a number or None, not nan"),
        ({"game": ":Game"}, "':Game' with arguments {} cannot be created"),
        ({"game": "NoSuchGame-v1"}, "'NoSuchGame-v1' with arguments {} cannot be created"),
        ({"game": "no_such_module:Game-v1"}, "no_such_module"),
        ({"game": "CartPole-v1", "game_kwargs": {"speed": 1}}, "'speed'"),
        ({"game": f"{__name__}:Counting", "actions": ["a", "b", "c"]}, "give max_turns"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Discrete(**{"describe": str, "actions": LEFT_RIGHT} | given)


def test_a_description_that_is_no_text_is_refused() -> None:
    env = counting(describe=lambda observation: None)
    with pytest.raises(TypeError, match="must return a text"):
        env.reset(seed=0)
    env = counting(default_action="fly")
    with pytest.raises(ValueError, match="default action 'fly'"):
        env.reset(seed=0)
