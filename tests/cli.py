"""The command `agentrl` in this process, with a small config. Its fixtures are in conftest.py."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.commands import main as commands

Config = dict[str, Any]
Command = Callable[..., tuple[int, str]]  # gives the exit code and standard error
Verify = Callable[..., tuple[int, list[str]]]  # gives the exit code and the lines it printed
Write = Callable[..., None]  # takes the name of each file and its text


def small_config(model: Path | str) -> Config:
    """One iteration of eight turns, in two mini-batches."""
    return {
        "model": {
            "class_path": "PPOAgent",
            "init_args": {"model": str(model), "critic": {"class_path": "SharedCritic"}},
        },
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "env": {"id": "agentrl_envs:Bandit-v0"},
                "num_envs": 4,
                "turns_per_env": 2,
                "mini_batch_turns": 4,
                "memory": {"class_path": "WindowMemory", "init_args": {"turns": 0}},
                "interaction": {"class_path": "TurnInteraction", "init_args": {"max_reply_tokens": 4}},
                "validation": {"episodes": 2},
            },
        },
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_model_summary": False},
    }


def changed(config: Config, key: str, value: Any) -> Config:
    config = copy.deepcopy(config)
    node = config
    *way, last = key.split(".")
    for part in way:
        node = node.setdefault(part, {})
    node[last] = value
    return config


def three_iterations(config: Config) -> Config:
    """With validation after the last, and a log of the turns."""
    config = changed(config, "seed_everything", 3)
    config["trainer"] |= {"max_epochs": 3, "callbacks": [{"class_path": "TurnLog"}]}
    config["model"]["init_args"] |= {"optim": {"lr_actor": 1e-3, "lr_critic": 1e-2}}
    return config


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit code."""
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
    try:
        commands.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def fit(config: Config, path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Train, with `path` as the working folder."""
    (path / "given.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(path)
    assert run_command(monkeypatch, "fit", "--config", "given.yaml", *arguments) == 0


def sentence(result: tuple[int, str]) -> str:
    """Return the one sentence of a refused input."""
    code, text = result
    assert code == 2
    assert "Traceback" not in text
    sentences = [line for line in text.splitlines() if line.startswith("agentrl: ")]
    assert len(sentences) == 1
    assert text.rstrip().endswith(sentences[0])
    return sentences[0].removeprefix("agentrl: ")


def judged(lines: list[str]) -> tuple[float, float, str]:
    """Return largest gap, mean gap and judgement of the last line of `agentrl verify-engine`."""
    match = re.fullmatch(r"gap_max=(\S+) gap_mean=(\S+) (ok|FAILED)", lines[-1])
    assert match, lines
    return float(match[1]), float(match[2]), match[3]
