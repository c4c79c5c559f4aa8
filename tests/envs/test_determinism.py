"""Same seed and actions, same episodes: for every registered id, whatever game it is."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import agentrl_envs
from agentrl_envs import ENV_IDS

# Suites that `agentrl_envs` can do without. A missing one is reported as a skip; any other failed import fails.
EXTRAS = ("textarena", "reasoning_gym", "textworld", "textworld_express")
QUICKER = {"CrafterText-v0": {"area": 16}}  # arguments of those whose reset takes a second
TURNS = 6
SEEDS = (3, 4)


def make(env_id: str) -> gymnasium.Env | str:
    """Make an environment; a sentence where it cannot be tested."""
    try:
        env = gymnasium.make(f"agentrl_envs:{env_id}", disable_env_checker=True, **QUICKER.get(env_id, {})).unwrapped
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            return str(error)
        raise
    return env if getattr(env, "deterministic", True) else "says itself that it cannot repeat an episode"


def plain(value: Any) -> Any:
    """A value as JSON can write it, equal exactly where the values are."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return value.item() if isinstance(value, np.generic) else value


def turns(env: gymnasium.Env, seed: int) -> Iterator[Any]:
    """Play some turns and yield all that the environment answers; an episode that ends is followed by another one."""
    begun: Any = env.reset(seed=seed)
    for turn in range(TURNS):
        names = list(getattr(env, "actions", {})) or ["1", "answer", "yes"]
        answer = env.step(names[(seed + turn * (1 + seed % 2)) % len(names)])
        yield plain([begun, answer, getattr(env, "system_prompt", "")])
        begun = env.reset() if answer[2] or answer[3] else None


def records() -> dict[str, Any]:
    """What every id answers to the first seed."""
    made = {env_id: make(env_id) for env_id in ENV_IDS}
    return {env_id: env if isinstance(env, str) else list(turns(env, SEEDS[0])) for env_id, env in made.items()}


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_a_used_instance_and_an_interleaved_one_tell_the_same(env_id: str) -> None:
    used, other = make(env_id), make(env_id)
    if isinstance(used, str) or isinstance(other, str):
        pytest.skip(f"{env_id}: {used}")
    first = list(turns(used, SEEDS[0]))
    pairs = list(zip(turns(used, SEEDS[0]), turns(other, SEEDS[1]), strict=True))
    assert [mine for mine, _ in pairs] == first
    assert [its for _, its in pairs] == list(turns(used, SEEDS[1]))


@pytest.mark.slow
def test_fresh_interpreters_with_other_string_hashes_tell_the_same() -> None:
    root = str(Path(agentrl_envs.__file__).parent.parent)
    code = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("determinism", {__file__!r})
module = importlib.util.module_from_spec(spec)
sys.modules["determinism"] = module
spec.loader.exec_module(module)
print(json.dumps(module.records()), file=sys.stderr)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    lines = [text.strip().splitlines()[-1] for text in said]
    here = json.loads(json.dumps(records()))
    for line in lines:
        there = json.loads(line)
        assert sorted(there) == sorted(ENV_IDS)
        assert [env_id for env_id in ENV_IDS if there[env_id] != here[env_id]] == []
