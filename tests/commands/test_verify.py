"""`agentrl verify-engine`: what it measures, and that it fails when the engine samples from other weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_agentrl.commands.verify_engine import BOUND, ROUGH_BOUND, ROUNDS, Gaps, default_bound, move
from lightning_agentrl.engines import TransformersEngine, VLLMEngine, VLLMServerEngine
from tests.cli import Config, Verify, changed, judged


def test_the_engine_of_the_trainer_itself_is_right(verify: Verify, config: Config) -> None:
    code, lines = verify(changed(config, "model.init_args.temperature", 0.7))
    assert code == 0
    largest, mean, judgement = judged(lines)
    assert judgement == "ok"
    assert 0 < mean < largest < 1e-4  # two ways of computing, in float32
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == ROUNDS
    assert all(re.search(r"\d+ tokens, gap largest \S+, mean \S+; ratio mean 1\.0000", line) for line in rounds)


def test_weights_that_are_not_taken_over_are_found(
    verify: Verify,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys and values of the prefix stay those of the weights before."""
    start = TransformersEngine.start

    def forgetful(self: TransformersEngine, handle: Any) -> None:
        start(self, handle)
        assert self._prefill is not None
        kept: list[int] = []
        forget = self._prefill.forget
        monkeypatch.setattr(self._prefill, "forget", lambda: kept.append(1) if self._prefill._prefix else forget())

    monkeypatch.setattr(TransformersEngine, "start", forgetful)
    code, lines = verify(config)
    assert code == 1
    largest, _, judgement = judged(lines)
    assert judgement == "FAILED"
    assert largest > BOUND
    assert "above the bound of 0.001" in lines[-2]


def test_the_bound_can_be_given(verify: Verify, config: Config) -> None:
    code, lines = verify(config, "--bound", "1e-12")
    assert code == 1
    assert judged(lines)[2] == "FAILED"


def test_nothing_is_trained_or_written(verify: Verify, config: Config, tmp_path: Path) -> None:
    config["trainer"]["logger"] = True
    config["trainer"]["callbacks"] = [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]
    assert verify(config)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml"}


def test_wrong_input_is_told(verify: Verify, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(changed(config, "model.init_args.modl", "x"))[0] == 2
    assert verify(config, "--bund", "1")[0] == 2


def test_gaps_by_hand() -> None:
    gaps = Gaps.together([Gaps((-1.0, -2.0), (-1.5, -2.0)), Gaps((-3.0,), (-2.0,))])
    assert gaps.distances == [0.5, 0.0, 1.0]
    assert (gaps.largest, gaps.mean) == (1.0, 0.5)
    assert gaps.ratios == pytest.approx([math.exp(-0.5), 1.0, math.e])
    assert "3 tokens, gap largest 1, mean 0.5; ratio mean 1.441604, 0.606531 to 2.718282" in str(gaps)
    spoilt = Gaps((-1.0, -1.0), (math.nan, -1.0))
    assert math.isnan(spoilt.largest)
    assert not spoilt.largest <= BOUND


def test_every_trained_weight_is_moved_by_a_share_of_its_size() -> None:
    module = nn.ModuleDict({"wide": nn.Linear(300, 200), "norm": nn.LayerNorm(4000), "frozen": nn.Linear(3, 3)})
    module["frozen"].requires_grad_(False)
    nn.init.normal_(module["wide"].weight, std=5.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    move(module, seed=1, share=0.1)
    for name, parameter in module.named_parameters():
        noise = (parameter - before[name]).detach()
        if name.startswith("frozen"):
            assert not noise.any()
        else:
            size = float(before[name].square().mean().sqrt()) or 1.0
            assert float(noise.square().mean().sqrt()) == pytest.approx(0.1 * size, rel=0.15)
    again = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(before[name])
    move(module, seed=1, share=0.1)
    assert all(torch.equal(p, again[name]) for name, p in module.named_parameters())


def computing_in(dtype: str) -> VLLMServerEngine:
    """As servers told it."""
    engine = VLLMServerEngine(["http://127.0.0.1:9"])
    engine.dtype = dtype
    return engine


@pytest.mark.parametrize(
    ("precision", "engine", "bound"),
    [
        ("32-true", TransformersEngine(), BOUND),
        ("64-true", VLLMEngine(), BOUND),
        ("bf16-mixed", VLLMEngine(), ROUGH_BOUND),
        ("32-true", VLLMEngine(dtype="bfloat16"), ROUGH_BOUND),
        ("32-true", VLLMEngine(dtype="float32"), BOUND),
        ("32-true", computing_in("float32"), BOUND),
        ("32-true", computing_in("bfloat16"), ROUGH_BOUND),
    ],
)
def test_fewer_digits_get_a_wider_bound(precision: str, engine: Any, bound: float) -> None:
    class Trainer:
        pass

    trainer: Any = Trainer()
    trainer.precision = precision
    assert default_bound(trainer, engine) == bound
