"""OpenEnv's own package at the other end; it needs other versions of our dependencies. See `make test-openenv`."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from agentrl_envs.openenv.connection import EnvironmentAtServerError, LostSocketError
from lightning_agentrl.commands.serve_env import environment_app
from lightning_agentrl.episodes.recipe import Recipe
from tests.envs.servers import serving

PYTHON = os.environ.get("OPENENV_PYTHON", "")
HERE = Path(__file__).parent
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON, reason="make test-openenv installs it")]


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [("GuessNumber-v0", {"highest": 6}), ("BabyAIText-GoToObjS4-v0", {"max_turns": 20})]
)
def test_their_client_plays_our_server_as_we_play_in_process(env_id, kwargs):
    source, episodes = Recipe(f"agentrl_envs:{env_id}", kwargs, "env"), 30
    with serving(environment_app(source, 1)) as url:
        command = [PYTHON, str(HERE / "openenv_client.py"), url, str(episodes)]
        played = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answers, state = json.loads(played.stdout)
    env, turns = source.make(), iter(answers)
    for seed in range(episodes):
        draw = random.Random(seed)
        observation, info = env.reset(seed=seed)
        names = [*env.unwrapped.actions, "dance"]
        said, reward, over, metadata = next(turns)
        assert (said["text"], reward, over) == (observation, None, False)
        assert metadata["system_prompt"] == env.unwrapped.system_prompt
        assert metadata["actions"] == env.unwrapped.actions
        while not over:
            observation, paid, terminated, truncated, info = env.step(draw.choice(names))
            said, reward, over, metadata = next(turns)
            assert (said["text"], reward, over) == (observation, paid, terminated or truncated)
            assert metadata == said["metadata"]
            assert metadata["truncated"] == truncated
            for name in ("success", "progression", "executed_action", "invalid_action"):
                assert metadata[name] == info[name]
    assert next(turns, None) is None
    assert state["step_count"] > 0


@pytest.fixture
def theirs() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, str(HERE / "openenv_server.py"), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_our_client_plays_their_server(theirs):
    url, process = theirs
    env = gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True)
    assert env.unwrapped.fields == ("message", "echo")
    for seed in (7, 8):
        assert env.reset(seed=seed)[0] == f"seed {seed}"
        assert env.unwrapped.free_text
        answers = [env.step(said) for said in ("one", "nan", "none", "x" * 5_000_000)]
        assert [answer[0][:6] for answer in answers] == ["1: one", "2: nan", "3: non", "4: xxx"]
        assert len(answers[-1][0]) == 5_000_003
        assert [(reward, info["metrics"]["no_reward"]) for _, reward, *_, info in answers] == [
            (0.5, 0),
            (0.0, 1),
            (0.0, 2),
            (0.5, 2),
        ]
        assert [answer[2:4] for answer in answers] == [(False, False)] * 3 + [(True, False)]

    second = gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True)
    with pytest.raises(ValueError, match="max_concurrent_envs"):
        gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, disable_env_checker=True)
    second.close()

    env.reset(seed=1)
    with pytest.raises(EnvironmentAtServerError, match="the game fell over"):
        env.step("boom")
    assert env.reset(seed=2)[0] == "seed 2"
    time.sleep(4)  # their server pings once a second, and closes the socket of a client that does not answer
    assert env.step("there?")[0] == "1: there?"
    env.close()

    env = gymnasium.make("agentrl_envs:OpenEnv-v0", url=url, timeout_seconds=1.0, disable_env_checker=True)
    env.reset(seed=1)
    with pytest.raises(TimeoutError):
        env.step("slow")
    time.sleep(3)
    assert env.reset(seed=2)[0] == "seed 2"  # a new socket: the late answer is not taken for this one
    process.kill()
    process.wait()
    with pytest.raises(LostSocketError):
        env.step("one")
    with pytest.raises(ConnectionError, match="no server answers"):
        env.reset(seed=3)
    env.close()
