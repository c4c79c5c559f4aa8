"""Self-play of docs/environments.md, from files of its own, does what the page says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.models.words import word_model
from tests.cli import Command, changed, fit, sentence
from tests.guides import importable, write_files

ROOT = Path(__file__).parents[2]
WORDS = ("Player", ",", "stones", ":", "0", "1", "2", "3", "4", "5", "6", "7")
SMALL = {
    "model.init_args.optim.lr_actor": 5e-3,
    "model.init_args.kl.reward": 0,
    "data.init_args.groups.per_rollout": 4,
    "data.init_args.interaction.init_args.max_reply_tokens": 1,
    "data.init_args.prompt": {"think": False, "instruction": "", "system": "", "max_prompt_tokens": 64},
    "trainer.max_epochs": 30,
    "trainer.enable_progress_bar": False,
    "trainer.enable_checkpointing": False,
    "trainer.logger": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The reader's, with both files of the page and a model whose words are those of the game."""
    word_model(WORDS, tmp_path / "model")
    write_files("environments.md", tmp_path)
    with importable(tmp_path):
        yield tmp_path


def small(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs" / "guess_number_grpo.yaml").read_text())
    config["data"]["init_args"] |= yaml.safe_load((folder / "self_play.yaml").read_text())["data"]["init_args"]
    for key, value in {**SMALL, "model.init_args.model": str(folder / "model")}.items():
        config = changed(config, key, value)
    return config


@pytest.mark.slow
def test_a_policy_learns_from_both_sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(small(folder), folder, monkeypatch)
    (log,) = folder.rglob("turns/rank0-*.jsonl")
    turns: list[dict[str, Any]] = [json.loads(line) for line in log.open()]
    games: dict[tuple[int, int], list[list[dict[str, Any]]]] = defaultdict(lambda: [[], []])
    for turn in turns:
        games[turn["env"], turn["episode"] // 2][turn["episode"] % 2].append(turn)
    assert len(games) == 30 * 4 * 8
    for first, second in games.values():
        check_game(first, second)
    assert any(len(second) > 1 for _, second in games.values())

    legal = [[turn["valid"] for turn in turns if turn["iteration"] == i + 1] for i in range(30)]
    shares = [sum(of_iteration) / len(of_iteration) for of_iteration in legal]
    assert shares[0] < 0.5
    assert sum(shares[-3:]) / 3 > 0.9


def check_game(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Both sides see the board as theirs and move in turn; who moves last wins by a legal move and loses by another."""
    for side, turns in enumerate((first, second), start=1):
        assert [turn["turn"] for turn in turns] == list(range(len(turns)))
        assert all(turn["observation"].startswith(f"Player {side},") for turn in turns)
        assert all(turn["observation"] in turn["prompt"].replace(" ,", ",").replace(" :", ":") for turn in turns)
        assert [turn["terminated"] for turn in turns] == [False] * (len(turns) - 1) + [True] * bool(turns)
        assert all(turn["reward"] == 0 for turn in turns[:-1])
    assert len(first) - len(second) in (0, 1)
    last, other = (first, second) if len(first) > len(second) else (second, first)
    won = 1.0 if last[-1]["valid"] else -1.0
    assert last[-1]["reward"] == last[-1]["episode_return"] == won
    assert last[-1]["success"] is (won > 0)
    if other:
        assert other[-1]["reward"] == other[-1]["episode_return"] == -won
        assert other[-1]["success"] is (won < 0)


@pytest.mark.slow
def test_half_games_are_refused(folder: Path, agentrl: Command) -> None:
    given = small(folder)
    del given["data"]["init_args"]["groups"]
    given["model"]["init_args"]["advantage"] = {"class_path": "DualDiscountGAE"}
    message = sentence(agentrl(config=given))
    assert "SidesInteraction plays whole games; set data.init_args.groups" in message
