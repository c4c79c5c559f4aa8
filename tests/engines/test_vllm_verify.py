"""`agentrl verify-engine` with vLLM: right as it is, and found out whatever kind of weight an update leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.engines import weights as engine_weights
from lightning_agentrl.engines.vllm import engine as vllm_engine
from tests.cli import Command, Config, Verify, changed, judged
from tests.engines.withheld import KINDS, Withholding, check_each_kind

pytestmark = pytest.mark.vllm


@pytest.fixture
def given(vllm_config: Config) -> Config:
    return changed(vllm_config, "data.init_args.interaction.init_args.max_reply_tokens", 24)


@pytest.mark.long  # besides what test_vllm_start.py looks at, and a run whose adapters stay those of the start
def test_adapters_are_sampled_with(verify: Verify, given: Config) -> None:
    lora = {"class_path": "LoRA", "init_args": {"rank": 4}}
    code, lines = verify(changed(given, "model.init_args.lora", lora))
    assert (code, judged(lines)[2]) == (0, "ok")


def test_each_kind_of_weight_that_is_withheld_is_found_out(
    verify: Verify,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_each_kind(verify, given, engine_weights, monkeypatch, capsys)


def test_the_gap_is_logged_in_every_iteration(vllm_played: Path) -> None:
    """Of the tokens that are trained on, and of weights that were trained: small in all iterations."""
    (path,) = vllm_played.rglob("metrics.csv")
    names, *rows = (line.split(",") for line in path.read_text().splitlines())
    for name in ("mismatch/logp_gap_mean", "mismatch/logp_gap_max"):
        values = [float(row[names.index(name)]) for row in rows if row[names.index(name)]]
        assert len(values) == 3
        assert 0 < max(values) < 3e-4


def stops(command: Command, config: Config) -> None:
    """`fit` ends before a step, with a sentence that names the command for the cause."""
    code, printed = command(config=config)
    assert code == 1
    assert "does not sample from the policy" in printed
    assert "agentrl verify-engine" in printed.splitlines()[-1]


@pytest.mark.parametrize("kind", [pytest.param("mlp", marks=pytest.mark.long), "tied head"])
def test_a_run_stops_where_updates_leave_a_tensor_out(
    agentrl: Command,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(engine_weights, "named_weights", Withholding([KINDS[kind]] * 9))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: pytest.fail("a step was taken"))
    stops(agentrl, given)


def test_a_run_stops_where_vllm_cuts_off_unlikely_tokens(
    agentrl: Command,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm

    params = vllm.SamplingParams
    monkeypatch.setattr(vllm, "SamplingParams", lambda **given: params(**given, top_p=0.9))
    stops(agentrl, given)


def test_a_run_stops_where_adapters_stay_those_of_the_start(
    agentrl: Command,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = vllm_engine.VLLMEngine._send_adapters
    sent: list[int] = []

    def once(self: Any, engine: Any) -> None:
        if not sent:
            send(self, engine)
        sent.append(1)

    monkeypatch.setattr(vllm_engine.VLLMEngine, "_send_adapters", once)
    lora = {"class_path": "LoRA", "init_args": {"rank": 4}}
    stops(agentrl, changed(given, "model.init_args.lora", lora))
