"""A secret of an environment is in no file that a run leaves, and in nothing that it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.cli import Command, Config, changed, sentence

SECRET = "sk-0123456789abcdef"


class Guarded(gymnasium.Env[str, str]):
    """Plays only for those who know the key."""

    actions = {"left": "go left", "right": "go right"}
    default_action = "left"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert self.api_key == SECRET
        return "a fork in the road", {}

    def step(self, action: str) -> Any:
        return "a fork in the road", 0.0, True, False, {}


gymnasium.register("Guarded-v0", entry_point=Guarded)


def test_a_run_leaves_no_secret_behind(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GUARD_KEY", SECRET)
    config = changed(config, "trainer.logger", True)
    config = changed(config, "trainer.enable_checkpointing", True)
    config = changed(config, "trainer.callbacks", [{"class_path": "TurnLog"}])
    env = ("--data.init_args.env.id=Guarded-v0", "--data.init_args.env.kwargs={api_key: '${GUARD_KEY}'}")
    code, told = agentrl(*env, config=config)
    assert code == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.yaml", "run.json"} <= {path.name for path in files}
    assert {".ckpt", ".jsonl"} <= {path.suffix for path in files}
    assert not [path for path, content in files.items() if SECRET.encode() in content]
    assert SECRET not in told
    record = next(path for path in files if path.name == "run.json")
    assert "${GUARD_KEY}" in json.loads(record.read_text())["command"]


def test_a_secret_in_the_config_is_refused_before_anything_is_written(
    config: Config, agentrl: Command, tmp_path: Path
) -> None:
    env = {"id": "Guarded-v0", "kwargs": {"api_key": SECRET}}
    told = sentence(agentrl(config=changed(config, "data.init_args.env", env)))
    assert "api_key" in told
    assert "${API_KEY}" in told
    assert SECRET not in told
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml"}
