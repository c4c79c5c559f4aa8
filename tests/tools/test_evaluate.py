"""Policies on equal seeds: numbers of a checkpoint and of baselines, refusals, the command and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml

from lightning_agentrl import Policy, RolloutDataModule, evaluate
from lightning_agentrl.agents.saved_policy import SavedPolicy
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import (
    EnvConfig,
    ExactMatch,
    OneTurn,
    PromptFormat,
    Task,
    TurnInteraction,
    ValidationConfig,
)
from lightning_agentrl.tools.evaluate import ALL, Evaluation
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.cli import run_command

BANDIT, GUESS = "agentrl_envs:Bandit-v0", "agentrl_envs:GuessNumber-v0"
IMAGES = {"id": "agentrl_envs:GridWorldImage-v0"}
gymnasium.register("FreeText-v0", lambda: OneTurn([Task("Say yes.", "yes")], ExactMatch()))


def suite(*envs: Any, episodes: int = 6, **further: Any) -> RolloutDataModule:
    given = [EnvConfig(**env) if isinstance(env, dict) else env for env in envs]
    kept: dict[str, Any] = {"prompt": PromptFormat(think=False), "interaction": TurnInteraction(8), "seed": 3}
    return RolloutDataModule(envs=given, validation=ValidationConfig(episodes, num_envs=4), **(kept | further))


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A checkpoint, and what its validation logged."""
    folder = tmp_path_factory.mktemp("run")
    trainer, data = make_trainer(folder, 1, limit_val_batches=1.0), make_data()
    trainer.fit(make_agent(tiny_folder), data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", {name: float(number) for name, number in trainer.callback_metrics.items()}


def test_a_checkpoint_has_the_numbers_of_its_validation(run: tuple[Path, dict[str, float]]) -> None:
    checkpoint, logged = run
    found = evaluate([checkpoint], suite({"id": GUESS}, episodes=8)).rates(0, 0)
    assert found["success"] == pytest.approx([logged[f"val/success{end}"] for end in ("", "_low", "_high")])
    assert found["return"] == pytest.approx(logged["val/return"])
    assert found["turns"] == pytest.approx(logged["val/mean_turns"])
    assert found["valid"] == pytest.approx(logged["val/valid_action_ratio"])


def test_policies_and_baselines_play_the_same_seeds(run: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    policy = Policy.from_checkpoint(run[0])
    games = suite({"id": BANDIT}, {"id": GUESS}, episodes=20)
    said: list[str] = []
    found = evaluate([policy, "random", "scripted"], games, samples=3, k=2, report=said.append)
    assert found.success.shape == (3, 2, 20, 3)
    assert found.success[2].all()  # the scripted player solves each seed
    assert 0 < found.success[1].mean() < 1
    assert found.rates(1)["valid"] == 1.0
    assert (found.success[1] != found.success[1][..., :1]).any()  # episodes of one seed differ
    assert found.difference(2, 1, 0)["success"][0] == pytest.approx(1 - found.success[1, 0].mean())
    assert found.difference(1, 1)["return"] == (0.0, 0.0, 0.0)
    assert len(said) == 6
    again = evaluate(["random"], suite({"id": BANDIT}, {"id": GUESS}, episodes=20), samples=3)
    assert np.array_equal(again.returns[0], found.returns[1])

    page = found.write(tmp_path / "out").read_text()
    assert "GuessNumber-v0" in page
    saved = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert saved["rates"]["C"]["GuessNumber-v0"]["pass@2"] == 1.0
    assert saved["differences"]["B-C"][ALL]["success"][0] < 0
    assert np.array_equal(saved["episodes"]["success"], found.success)
    table = found.table()
    assert re.search(r"C +100\.0 % \(83\.9 to 100\.0\) +100\.0 %", table)
    assert f"B - C  {found.difference(1, 2)['success'][0]:+.3f}" in table
    policy.close()


REFUSED: list[tuple[list[str], Callable[[], RolloutDataModule], dict[str, int], str]] = [
    (["random"], lambda: suite({"id": BANDIT}), {"samples": 2, "k": 3}, "pass@3 needs at least 3 episodes per seed"),
    (["random"], lambda: suite({"id": "agentrl_envs:Bandits-v0"}), {}, r"Bandits-v0.*data.init_args.envs\[0\]"),
    (["FOLDER"], lambda: suite({"id": BANDIT}), {}, "has no prompt settings.*agentrl export"),
    (["RUN"], lambda: suite({"id": BANDIT}, IMAGES), {}, "cannot play GridWorldImage-v0: .*reads text only"),
    (["RUN", "gone.ckpt"], lambda: suite({"id": BANDIT}), {}, "no checkpoint file 'gone.ckpt'"),
    (["RUN", "random"], lambda: suite({"id": "FreeText-v0"}), {}, "'random' cannot play FreeText-v0: .*free text"),
    (["RUN", "scripted"], lambda: suite({"id": "FreeText-v0"}), {}, "'scripted' cannot play .*no scripted player"),
]


@pytest.mark.parametrize(("policies", "games", "numbers", "sentence"), REFUSED, ids=[one[-1][:24] for one in REFUSED])
def test_refusals_come_before_weights_are_read(
    run: tuple[Path, dict[str, float]],
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: list[str],
    games: Callable[[], RolloutDataModule],
    numbers: dict[str, int],
    sentence: str,
) -> None:
    monkeypatch.setattr(SavedPolicy, "load", lambda _: pytest.fail("weights were read"))
    named = {"RUN": str(run[0]), "FOLDER": str(tiny_folder)}
    with pytest.raises(ConfigError, match=sentence) as refused:
        evaluate([named.get(one, one) for one in policies], games(), **numbers)
    assert "\n" not in str(refused.value)


def test_environments_count_alike_over_all() -> None:
    success = np.zeros((1, 2, 4, 2), bool)
    success[0, 0, :, 0] = True
    ones = np.ones((1, 2, 4, 2))
    valid = np.stack([ones[:, 0], 3 * ones[:, 1]], axis=1)
    turns = np.stack([2 * ones[:, 0], 4 * ones[:, 1]], axis=1)
    found = Evaluation(("x",), ("one", "two"), (1, 2, 3, 4), 2, success, ones, turns, valid, success)
    assert found.rates(0)["success"][0] == 0.25
    assert found.rates(0)["pass@2"] == 0.5
    assert found.rates(0)["valid"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert found.rates(0)["turns"] == 3.0


def test_command_prints_the_table_and_writes_the_files(
    run: tuple[Path, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"envs": [{"id": BANDIT}], "validation": {"episodes": 4, "num_envs": 4}}
    Path("suite.yaml").write_text(
        yaml.safe_dump({"data": {"class_path": "RolloutDataModule", "init_args": data}}), encoding="utf-8"
    )
    given = "evaluate", str(run[0]), "random", "--config", "suite.yaml"
    assert run_command(monkeypatch, *given, "--samples", "2") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^A  .*last.ckpt\nB  random$", printed, re.M)
    assert "pass@2" in printed
    assert Path("evaluation/evaluation.html").is_file()
    assert run_command(monkeypatch, *given, "--data.init_args.validation.epsiodes", "2") == 2
    assert "did you mean episodes" in capsys.readouterr().err.replace("data.init_args.validation.", "")
    assert run_command(monkeypatch, "evaluate", "--config", "suite.yaml") == 2
    assert "name at least one policy" in capsys.readouterr().err
