"""`agentrl verify-engine`: what it measures, and that it fails when the engine samples from other weights."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.commands.verify_engine import ROUNDS
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.metrics.mismatch import EXACT, ROUGH
from tests.cli import Command, Config, Verify, changed, judged


def test_the_engine_of_the_trainer_itself_is_right(verify: Verify, config: Config) -> None:
    code, lines = verify(changed(config, "model.init_args.temperature", 0.7))
    assert code == 0
    largest, mean, judgement = judged(lines)
    assert judgement == "ok"
    assert 0 < mean < largest < 1e-4  # two ways of computing, in float32
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == ROUNDS
    tokens = [re.search(r"(\d+) tokens, log-prob mismatch largest \S+, mean \S+", line) for line in rounds]
    assert all(found and int(found[1]) >= 500 for found in tokens)


@pytest.mark.slow
def test_weights_that_are_not_taken_over_are_found(
    verify: Verify,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys and values of the prefix stay those of the weights before."""
    sync = TransformersEngine.sync

    def forgetful(self: TransformersEngine, policy_version: int) -> None:
        assert self._batch is not None
        prefill: Any = self._batch.prefill
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


def test_the_bound_can_be_given(verify: Verify, config: Config) -> None:
    code, lines = verify(config, "--bound", "1e-12")
    assert code == 1
    assert judged(lines)[2] == "FAILED"
    assert "rounding" in lines[-2]  # a gap below the usual bounds has no other cause


@pytest.mark.slow
def test_nothing_is_trained_or_written(verify: Verify, config: Config, tmp_path: Path) -> None:
    config["trainer"]["logger"] = True
    config["trainer"]["callbacks"] = [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]
    assert verify(config)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml"}


@pytest.mark.slow
def test_the_weights_of_a_checkpoint_are_compared_if_the_command_line_names_one(
    verify: Verify, agentrl: Command, config: Config
) -> None:
    trained = changed(config, "model.init_args.optim", {"lr_actor": 0.1})
    assert agentrl(config=changed(trained, "trainer.default_root_dir", "run"))[0] == 0
    (checkpoint,) = Path("run").rglob("iteration-*.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Be aware that")  # of callbacks that the checkpoint knows
        code, lines = verify(config, "--ckpt_path", str(checkpoint))
    assert code == 0
    assert str(checkpoint) in lines[0]
    code, untrained = verify(changed(config, "ckpt_path", "gone.ckpt"))  # as the config of a run that went on has it
    assert code == 0
    assert ".ckpt" not in untrained[0]
    assert not set(lines) & set(untrained)  # other weights, so other gaps
    assert verify(config, "--ckpt_path", "gone.ckpt")[0] == 2


@pytest.mark.slow
def test_it_compares_in_float32_unless_told_otherwise(verify: Verify, config: Config) -> None:
    rough = changed(config, "trainer.precision", "bf16-mixed")
    assert "32-true" in verify(rough)[1][0]
    code, lines = verify(rough, "--trainer.precision", "bf16-mixed")
    assert code == 0
    assert "bf16-mixed" in lines[0]
    largest, mean, _ = judged(lines)
    assert EXACT.mean < mean < ROUGH.mean
    assert EXACT.largest < largest < ROUGH.largest
