"""The steps of docs/environments.md with the project of `agentrl new`: checked, played, inspected and trained on."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml

from lightning_agentrl.models.words import word_model
from lightning_agentrl.tools.new import make_project
from tests.cli import changed, fit, run_command
from tests.guides import files_of, importable

WORDS = ("Something", "shines", "to", "the", "west", "east", ".", "Observation", ":", "up")
SMALL = {
    "model.init_args.optim": {"lr_actor": 5e-3},
    "data.init_args.interaction.init_args.max_reply_tokens": 1,
    "data.init_args.prompt": {
        "think": False,
        "instruction": "",
        "system": "",
        "examples": False,
        "max_prompt_tokens": 64,
    },
    "trainer.precision": "32-true",
    "trainer.max_epochs": 24,
    "trainer.enable_progress_bar": False,
    "trainer.enable_checkpointing": False,
    "trainer.logger": False,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's new project."""
    make_project(folder := tmp_path / "my_game")
    monkeypatch.chdir(folder)
    with importable(folder):
        yield folder


def small(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    word_model(WORDS, folder / "model")
    for key, value in {**SMALL, "model.init_args.model": str(folder / "model")}.items():
        config = changed(config, key, value)
    return config


def test_the_page_shows_the_game_of_the_project(folder: Path) -> None:
    assert (folder / "corridor.py").read_text().endswith(files_of("environments.md")["corridor.py"])


def test_the_game_can_be_won(folder: Path) -> None:
    env = gymnasium.make("corridor:Corridor-v0")
    observation, info = env.reset(seed=0)
    ended, reward = False, 0.0
    while not ended:
        observation, reward, terminated, truncated, info = env.step("east" if "east" in observation else "west")
        ended = terminated or truncated
    assert info["success"]
    assert reward == 1.0


@pytest.mark.slow
def test_the_steps_of_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert run_command(monkeypatch, "check-env", "corridor:Corridor-v0", "--seconds", "4") == 0
    assert " 0 errors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("west\nup\n"))
    assert run_command(monkeypatch, "play", "corridor:Corridor-v0", "--config", "config.yaml") == 0
    assert "Something shines to the" in capsys.readouterr().out
    assert run_command(monkeypatch, "inspect", "--config", "config.yaml", "--episodes", "16") == 0
    printed = capsys.readouterr().out
    assert "valid actions" in printed
    assert "! below 95.0 %" in printed  # a random model says anything
    assert (folder / "runs" / "inspect.html").exists()
    fit(config, folder, monkeypatch)
    summary = json.loads((folder / "runs" / "summary.json").read_text())
    assert summary["before"]["valid_action_ratio"] < 0.5
    assert summary["after"]["valid_action_ratio"] > 0.9
    assert run_command(monkeypatch, "view", "runs") == 0
