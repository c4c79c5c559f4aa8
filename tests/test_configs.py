"""Every shipped config is understood, and runs for two iterations after its warm-up with a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_agentrl import commands

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def agentrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
    commands.main()


def made_small(config: dict[str, Any], model: Path) -> dict[str, Any]:
    """The same parts with a tiny model, few turns and two iterations after a warm-up of one."""
    config["model"]["init_args"] |= {"model": str(model), "max_tokens_per_micro_batch": 4096}
    data = config["data"]["init_args"]
    data |= {"num_envs": 4, "turns_per_env": 2, "mini_batch_turns": 4}
    data["prompt"]["max_prompt_tokens"] = 1900  # a tiny tokenizer needs many tokens
    data["interaction"]["init_args"]["max_reply_tokens"] = 8
    data["validation"] |= {"episodes": 2, "num_envs": 2}
    data["env"]["kwargs"] = data["env"].get("kwargs", {}) | _short_episodes(data["env"]["id"])
    trainer = config["trainer"]
    trainer |= {"accelerator": "cpu", "max_epochs": 3, "check_val_every_n_epoch": 2}
    for callback in trainer["callbacks"]:
        if callback["class_path"] == "CriticWarmup":
            callback["init_args"] = {"rollouts": 1, "rounds": 1, "fraction": 1.0}
        if callback["class_path"] == "ModelCheckpoint":
            callback["init_args"]["every_n_epochs"] = 3
    return config


def _short_episodes(env_id: str) -> dict[str, Any]:
    return {} if "Bandit" in env_id else {"max_turns": 4}


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"quickstart", "bandit", "guess_number", "babyai_goto_qwen2.5-3b"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_understood(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        agentrl(monkeypatch, "fit", "--config", str(path), "--print_config")
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(path.read_text())
    assert shown["trainer"]["max_epochs"] == given["trainer"]["max_epochs"]
    assert shown["data"]["init_args"]["num_envs"] == given["data"]["init_args"]["num_envs"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_runs(
    path: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made_small(yaml.safe_load(path.read_text()), tiny_folder)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)  # a config writes below runs/ of the folder it is started in
    agentrl(monkeypatch, "fit", "--config", "small.yaml")

    run = tmp_path / config["trainer"]["default_root_dir"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 2
    if "ModelCheckpoint" in path.read_text():
        assert (tmp_path / summary["checkpoint"]).is_file()
    (events,) = run.rglob("events.out.tfevents.*")
    logged = EventAccumulator(str(events)).Reload().Scalars("rollout/reward_per_turn")
    assert len(logged) == 3
    assert all(math.isfinite(point.value) for point in logged)
    assert "iteration 3/3 train" in capsys.readouterr().out
