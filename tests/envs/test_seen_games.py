"""Games that can be seen as well as read: the same game, the same image, and no text that gives the image away."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import agentrl_envs
from agentrl_envs import TextEnv
from agentrl_envs.picture_space import PictureSpace

SEEN: dict[str, dict[str, Any]] = {
    "FrozenLakeText-v0": {"cell_px": 16},
    "SokobanText-v0": {"cell_px": 28},
    "BabyAIText-GoToObjS6-v0": {"cell_px": 28},
    "BabyAIText-PutNext-v0": {"mission_in": "observation"},
    "BabaIsAI-make_win-v0": {},
    "BabaIsAI-two_room-goto_win-v0": {"cell_px": 28},
    "CrafterText-v0": {"area": 16},
}
ALWAYS: dict[str, dict[str, Any]] = {
    "ZoomSearch-v0": {"canvas_px": 512},
    "DrawnGeometry-v0": {"checks": 1},
}


def make(env_id: str, **kwargs) -> TextEnv:
    return gymnasium.make(f"agentrl_envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def hashes(images: tuple[np.ndarray, ...]) -> list[Any]:
    return [[*image.shape, hashlib.sha256(image.tobytes()).hexdigest()] for image in images]


@pytest.mark.slow
@pytest.mark.parametrize("env_id", SEEN)
def test_text_image_and_both_are_one_game(env_id) -> None:
    envs = [make(env_id, observation=kind, **SEEN[env_id]) for kind in ("text", "image", "both")]
    text, image, both = (env.reset(seed=3)[0] for env in envs)
    names = [*envs[0].actions, "juggle"]
    for turn in range(8):
        assert (envs[0].observation_space.contains(text), both["text"].endswith(text)) == (True, True)
        assert hashes(both["images"]) == hashes(image["images"])
        assert len(image["images"]) == 1
        for env, seen in ((envs[1], image), (envs[2], both)):
            assert env.observation_space.contains(seen)
            assert min(seen["images"][0].shape[:2]) >= 56  # two tokens or more each way
        lines = [line for line in image["text"].splitlines() if "no action" not in line]
        assert all(line.startswith(("Mission", "You carry")) for line in lines)
        action = names[(turn * 3) % len(names)]
        answers = [env.step(action) for env in envs]
        assert answers[0][1:4] == answers[1][1:4] == answers[2][1:4]
        text, image, both = (answer[0] for answer in answers)
        assert ("no action" in image["text"]) == (action == "juggle")
        if answers[0][2] or answers[0][3]:
            break
    assert envs[1].system_prompt != envs[0].system_prompt


def test_what_is_carried_is_told_beside_an_image() -> None:
    env = make("BabyAIText-PickUp-v0", observation="image")
    env.reset(seed=0)
    play = env.solver()
    for _ in range(40):
        seen, _, terminated, _, _ = env.step(play())
        if terminated:
            break
    assert seen["text"] == f"You carry {env.mission.removeprefix('pick up ').replace('the', 'a')}"


@pytest.mark.parametrize("env_id", SEEN)
def test_wrong_arguments(env_id) -> None:
    for wrong, sentence in (({"observation": "video"}, "not 'video'"), ({"cell_px": 4}, "8 to 128, not 4")):
        with pytest.raises(ValueError, match=sentence):
            make(env_id, **{**SEEN[env_id], **wrong})


@pytest.mark.parametrize("env_id", ["BabyAIText-GoToObjS6-v0", "BabaIsAI-make_win-v0"])
def test_the_gymnasium_checker_accepts(env_id) -> None:
    check_env(make(env_id, observation="both"), skip_render_check=True)


def test_the_space_of_pictures_holds_rgb_of_any_size() -> None:
    space = PictureSpace(100)
    assert space.contains(np.zeros((1, 100, 3), np.uint8))
    assert space.contains(space.sample())
    for wrong in (
        np.zeros((101, 5, 3), np.uint8),
        np.zeros((0, 5, 3), np.uint8),
        np.zeros((5, 5, 4), np.uint8),
        np.zeros((5, 5), np.uint8),
        np.zeros((5, 5, 3), np.float32),
        [[[0, 0, 0]]],
        None,
    ):
        assert not space.contains(wrong)


def record() -> dict[str, Any]:
    """Hashes of images and the rewards of a few turns of each game."""
    found = {}
    for env_id, kwargs in {
        **{name: {**given, "observation": "both"} for name, given in SEEN.items()},
        **ALWAYS,
    }.items():
        env = make(env_id, **kwargs)
        seen, _ = env.reset(seed=5)
        turns = [[seen["text"], hashes(seen["images"])]]
        play = env.solver()
        for _ in range(3):
            seen, reward, terminated, truncated, _ = env.step(play())
            turns.append([seen["text"], hashes(seen["images"]), reward])
            if terminated or truncated:
                break
        found[env_id] = turns
    return found


@pytest.mark.slow
def test_fresh_interpreters_with_other_string_hashes_draw_the_same() -> None:
    root = str(Path(agentrl_envs.__file__).parent.parent)
    code = f"""
import importlib.util, json
spec = importlib.util.spec_from_file_location("seen_games", {__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("\\n" + json.dumps(module.record()))
"""
    here = json.loads(json.dumps(record()))
    for hash_seed in ("1", "2"):
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == here
