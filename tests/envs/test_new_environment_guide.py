"""The environment of docs/guides/new_environment.md, from files of its own: played, looked at and trained on."""

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
from tests.cli import changed, fit, run_command
from tests.guides import importable, write_files

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
    """The reader's, with both files of the page."""
    monkeypatch.chdir(tmp_path)
    write_files("new_environment.md", tmp_path)
    with importable(tmp_path):
        yield tmp_path


def small(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / "corridor.yaml").read_text())
    word_model(WORDS, folder / "model")
    for key, value in {**SMALL, "model.init_args.model": str(folder / "model")}.items():
        config = changed(config, key, value)
    return config


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
    (folder / "corridor.yaml").write_text(yaml.safe_dump(config))
    assert run_command(monkeypatch, "check-env", "corridor:Corridor-v0", "--seconds", "4") == 0
    assert " 0 errors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("west\nup\n"))
    assert run_command(monkeypatch, "play", "corridor:Corridor-v0", "--config", "corridor.yaml") == 0
    assert "Something shines to the" in capsys.readouterr().out
    assert run_command(monkeypatch, "inspect", "--config", "corridor.yaml", "--episodes", "16") == 0
    printed = capsys.readouterr().out
    assert "valid actions" in printed
    assert "! below 95.0 %" in printed  # a random model says anything
    assert (folder / "runs" / "corridor" / "inspect.html").exists()
    fit(config, folder, monkeypatch)
    summary = json.loads((folder / "runs" / "corridor" / "summary.json").read_text())
    assert summary["before"]["valid_action_ratio"] < 0.5
    assert summary["after"]["valid_action_ratio"] > 0.9
    assert run_command(monkeypatch, "view", "runs/corridor") == 0
