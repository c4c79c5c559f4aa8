"""Numbers of each source of a mixed run: of training and held out, by hand, in a run, and as a table."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_agentrl.commands.held_out_table import MEAN, held_out_table
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.metrics.episodes import EpisodeMetrics, EpisodeResult
from lightning_agentrl.metrics.rollout import source_numbers
from lightning_agentrl.types import StopReason
from tests.cli import Config, fit, run_command
from tests.metrics.test_episodes import RESULTS, held_out
from tests.types.samples import turn

A, B, C = "a-game", "another", "a-third"
HELD_OUT = [
    *RESULTS,
    EpisodeResult(True, 1.0, 3, 3, progression=0.5, source=2),
    EpisodeResult(False, 0.0, 3, 0, progression=0.0, source=2),
]
OF_ALL_SOURCES = {  # nothing is played of B
    "val/sources/progression": (0.85 + 0.25) / 2,
    "val/sources/progression_error": ((3 * 0.15**2 + 0.45**2) / 12 + 0.125 / 2) ** 0.5 / 2,
}
TURNS = [
    turn(env=0, valid=False, reward=-0.5),
    turn(env=0, index=1, reward=2.5, terminated=True, stop=StopReason.ENV_DONE, success=True, episode_return=2.0),
    turn(env=1, index=4, truncated=True, stop=StopReason.MAX_TURNS, success=False, hit_token_cap=True),
    turn(env=2),
]
OF_SOURCES = {
    f"rollout/source/{A}/reward_per_turn": 1.0,
    f"rollout/source/{A}/valid_action_ratio": 1 / 2,
    f"rollout/source/{A}/invented_action_ratio": 0.0,
    f"rollout/source/{A}/token_cap_ratio": 0.0,
    f"rollout/source/{A}/episodes": 1,
    f"rollout/source/{A}/success": 1.0,
    f"rollout/source/{A}/return": 2.0,
    f"rollout/source/{A}/episode_turns": 2.0,
    f"rollout/source/{A}/truncated_ratio": 0.0,
    f"rollout/source/{B}/reward_per_turn": 0.0,
    f"rollout/source/{B}/valid_action_ratio": 1.0,
    f"rollout/source/{B}/invented_action_ratio": 0.0,
    f"rollout/source/{B}/token_cap_ratio": 1 / 2,
    f"rollout/source/{B}/episodes": 1,
    f"rollout/source/{B}/success": 0.0,
    f"rollout/source/{B}/return": 0.0,
    f"rollout/source/{B}/episode_turns": 5.0,
    f"rollout/source/{B}/truncated_ratio": 1.0,
}


def of_sources() -> dict[str, float]:
    metrics = EpisodeMetrics((A, B, C))
    metrics.update(HELD_OUT)
    return {f"val/{name}": number for name, number in metrics.compute().items()}


def test_each_source_has_the_numbers_it_would_have_alone() -> None:
    found, alone = of_sources(), held_out(RESULTS)
    for name, number in alone.items():
        assert found[name.replace("val/", f"val/source/{A}/")] == pytest.approx(number)
    assert not [name for name in found if f"/{B}/" in name]
    assert {name: found[name] for name in OF_ALL_SOURCES} == pytest.approx(OF_ALL_SOURCES)
    assert found["val/episodes"] == 6


def test_errors_over_all_sources_are_those_of_all_episodes() -> None:
    """Also where sources are far apart, and one of them far from 0."""
    far = [replace(one, total_reward=one.total_reward + 1e9 * (one.source == 2)) for one in HELD_OUT]
    metrics = EpisodeMetrics((A, B, C))
    metrics.update(far)
    found, alone = metrics.compute(), held_out([replace(one, source=0) for one in far])
    for key in ("return_error", "progression_error"):
        assert found[key] == pytest.approx(alone[f"val/{key}"], rel=1e-9)
    assert found[f"source/{C}/return_error"] == pytest.approx(0.5)


def test_an_error_needs_two_episodes_of_every_source() -> None:
    metrics = EpisodeMetrics((A, B))
    metrics.update([RESULTS[0], RESULTS[1], EpisodeResult(True, 1.0, 1, 1, progression=1.0, source=1)])
    numbers = metrics.compute()
    assert "sources/progression_error" not in numbers
    assert numbers["sources/progression"] == pytest.approx((0.7 + 1) / 2)


def test_turns_of_training_are_counted_for_their_source() -> None:
    numbers = source_numbers(TURNS, lambda one: A if one.env == 0 else B)
    assert over_ranks(numbers) == pytest.approx(OF_SOURCES)


def test_the_table_has_a_line_for_each_source_and_their_mean() -> None:
    lines = held_out_table(of_sources(), [A, B, C]).splitlines()
    assert [re.split(r"  +", line)[0] for line in lines] == ["source", A, B, C, MEAN]
    assert re.search(r" 4 +75\.0 % \(30\.1 to 95\.4\) +0\.850 ± 0\.150 +1\.625 ± 0\.898 +3\.0 +75\.0 %$", lines[1])
    assert lines[2].split()[-1] == "0"
    assert "0.550 ± " in lines[-1]
    alone = held_out_table(held_out(RESULTS), [A]).splitlines()
    assert [re.sub(" +", " ", line) for line in alone] == [re.sub(" +", " ", line) for line in lines[:2]]


@pytest.mark.slow
def test_a_mixed_run_tells_them(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also two sources of one name."""
    data = config["data"]["init_args"]
    del data["env"]
    game = "agentrl_envs:Bandit-v0"
    data["envs"] = [{"id": game}, {"id": game, "kwargs": {"arms": 2}}]
    data["validation"] = {"episodes": 8}
    config["trainer"] |= {
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}},
        "callbacks": [{"class_path": "RunSummary"}],
    }
    fit(config, tmp_path, monkeypatch)
    (log,) = tmp_path.rglob("metrics.csv")
    names = set(csv.DictReader(log.open()).fieldnames or ())
    for name in ("Bandit-v0", "Bandit-v0_2"):
        assert {f"rollout/source/{name}/success", f"rollout/source/{name}/episodes"} <= names
    summary = json.loads((tmp_path / "summary.json").read_text())
    own = summary["after"]["sources"]
    assert sum(part["episodes"] for part in own.values()) == summary["after"]["episodes"] == 8
    capsys.readouterr()
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    assert run_command(monkeypatch, "validate", "--config", "given.yaml") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Bandit-v0 +\d", printed, re.M)
    assert re.search(r"^Bandit-v0_2 +\d", printed, re.M)
    assert re.search(rf"^{MEAN} +\d", printed, re.M)
