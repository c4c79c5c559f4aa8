"""`agentrl verify-engine`: what it measures, and that it fails when the engine samples from other weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.commands import main as commands
from lightning_agentrl.commands.verify_engine import ROUNDS
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.metrics.gap import EXACT, ROUGH
from tests.commands.test_cli import Config, changed, config  # noqa: F401 - a fixture

Verify = Callable[..., tuple[int, list[str]]]  # gives the exit code and the lines it printed


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Run the command in this process."""
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    monkeypatch.chdir(tmp_path)

    def run(config: Config, *arguments: str) -> tuple[int, list[str]]:  # noqa: F811
        (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["agentrl", "verify-engine", "--config", "given.yaml", *arguments])
        capsys.readouterr()
        code = 0
        try:
            commands.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        told = capsys.readouterr()
        print(told.err, file=sys.stderr)  # shown if the test fails
        return code, told.out.splitlines()

    return run


LAST = re.compile(r"gap_max=(\S+) gap_mean=(\S+) (ok|FAILED)")


def judged(lines: list[str]) -> tuple[float, float, str]:
    """Largest gap, mean gap and judgement of the last line."""
    match = LAST.fullmatch(lines[-1])
    assert match, lines
    return float(match[1]), float(match[2]), match[3]


def test_the_engine_of_the_trainer_itself_is_right(verify: Verify, config: Config) -> None:  # noqa: F811
    code, lines = verify(changed(config, "model.init_args.temperature", 0.7))
    assert code == 0
    largest, mean, judgement = judged(lines)
    assert judgement == "ok"
    assert 0 < mean < largest < 1e-4  # two ways of computing, in float32
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == ROUNDS
    tokens = [re.search(r"(\d+) tokens, gap largest \S+, mean \S+", line) for line in rounds]
    assert all(found and int(found[1]) >= 500 for found in tokens)


def test_weights_that_are_not_taken_over_are_found(
    verify: Verify,
    config: Config,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys and values of the prefix stay those of the weights before."""
    sync = TransformersEngine.sync

    def forgetful(self: TransformersEngine, policy_version: int) -> None:
        prefill: Any = self._prefill
        kept = prefill._prefix, prefill._prefix_cache
        sync(self, policy_version)
        if kept[0]:
            prefill._prefix, prefill._prefix_cache = kept

    monkeypatch.setattr(TransformersEngine, "sync", forgetful)
    code, lines = verify(config)
    assert code == 1
    largest, _, judgement = judged(lines)
    assert judgement == "FAILED"
    assert largest > EXACT.largest
    assert "prefix" in lines[-2]


def test_the_bound_can_be_given(verify: Verify, config: Config) -> None:  # noqa: F811
    code, lines = verify(config, "--bound", "1e-12")
    assert code == 1
    assert judged(lines)[2] == "FAILED"


def test_nothing_is_trained_or_written(verify: Verify, config: Config, tmp_path: Path) -> None:  # noqa: F811
    config["trainer"]["logger"] = True
    config["trainer"]["callbacks"] = [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]
    assert verify(config)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml"}


def test_wrong_input_is_told(verify: Verify, config: Config, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert verify(changed(config, "model.init_args.modl", "x"))[0] == 2
    assert verify(config, "--bund", "1")[0] == 2


def test_it_compares_in_float32_unless_told_otherwise(verify: Verify, config: Config) -> None:  # noqa: F811
    rough = changed(config, "trainer.precision", "bf16-mixed")
    assert "32-true" in verify(rough)[1][0]
    code, lines = verify(rough, "--trainer.precision", "bf16-mixed")
    assert code == 0
    assert "bf16-mixed" in lines[0]
    largest, mean, _ = judged(lines)
    assert EXACT.mean < mean < ROUGH.mean
    assert EXACT.largest < largest < ROUGH.largest
