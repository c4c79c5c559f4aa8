"""Text adventures: repeatable, solved by their own solution, and closed with their simulator."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.envs.hostile import REPLIES

pytestmark = pytest.mark.long  # each environment starts a Java runtime


def make(**kwargs: Any) -> gymnasium.Env:
    pytest.importorskip("textworld_express", reason="of an extra")
    return gymnasium.make("agentrl_envs:TextWorldExpress-v0", disable_env_checker=True, **kwargs)


def play(env: gymnasium.Env, seed: int) -> list[Any]:
    draw, answers = random.Random(seed), [(*env.reset(seed=seed), env.unwrapped.system_prompt)]
    over = False
    while not over:
        names = list(env.unwrapped.actions)
        answer = env.step(draw.choice(names))
        answers.append((names, *answer))
        over = answer[2] or answer[3]
    return answers


@pytest.mark.parametrize("game", ["coin", "mapreader", "twc"])
def test_equal_seed_and_actions_are_an_equal_episode_and_the_solution_solves(game):
    envs = [make(game=game, max_turns=12) for _ in range(2)]
    try:
        for seed in (1, 2, 1):
            first, second = (play(env, seed) for env in envs)
            assert first == second
            assert first[-1][3:5] in ((True, False), (False, True))
        env = make(game=game, max_turns=100)
        envs.append(env)
        env.reset(seed=5)
        solve, paid, over = env.unwrapped.solver(), 0.0, False
        while not over:
            _, reward, over, _, info = env.step(solve())
            assert not info["invalid_action"]
            paid += reward
        assert info["success"]
        assert paid == pytest.approx(1.0)
    finally:
        for env in envs:
            env.close()


def test_hostile_replies_run_the_default_action():
    env = make()
    for reply in REPLIES:
        env.reset(seed=1)
        assert env.step(reply)[-1]["invalid_action"]
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"game": "koin"}, "Unknown game"),
        ({"params": {"numRooms": 3}}, "Known properties: numLocations"),
        ({"params": {"numLocations": "many"}}, "params {'numLocations': 'many'}"),
        ({"fold": "valid"}, "train, dev or test"),
    ],
)
def test_games_that_are_not_there_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_generated_games_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="of an extra")
    games = []
    for folder in ("one", "other"):
        settings = {"games": 2, "max_turns": 8, "folder": str(tmp_path / folder)}
        env = gymnasium.make("agentrl_envs:TextWorld-v0", disable_env_checker=True, **settings)
        games.append([play(env, seed) for seed in (1, 2, 1)])
        env.reset(seed=3)
        solve, over = env.unwrapped.solver(), False
        while not over:
            _, _, over, truncated, info = env.step(solve())
            assert not truncated
        assert info["success"]
        assert info["progression"] == 1.0
        for reply in REPLIES:
            env.reset(seed=1)
            assert env.step(reply)[-1]["invalid_action"]
        env.close()
        assert len(list((tmp_path / folder).iterdir())) <= 2
    assert games[0] == games[1]
    with pytest.raises(ValueError, match="rooms is 0"):
        gymnasium.make("agentrl_envs:TextWorld-v0", disable_env_checker=True, rooms=0)
