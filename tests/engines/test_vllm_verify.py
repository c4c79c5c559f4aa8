"""`agentrl verify-engine` with vLLM: right as it is, and found out whatever kind of weight an update leaves out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_agentrl.engines import vllm_engine
from lightning_agentrl.engines.weights import named_weights
from lightning_agentrl.verify import BOUND
from tests.test_cli import Config, changed
from tests.test_verify import Verify, judged, verify  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def given(vllm_config: Config) -> Config:
    return changed(vllm_config, "data.init_args.interaction.init_args.max_reply_tokens", 24)


def test_vllm_samples_from_what_is_trained(verify: Verify, given: Config) -> None:  # noqa: F811
    code, lines = verify(changed(given, "model.init_args.temperature", 0.8))
    assert (code, judged(lines)[2]) == (0, "ok")
    assert judged(lines)[0] < 3e-4


def test_so_do_adapters(verify: Verify, given: Config) -> None:  # noqa: F811
    lora = {"class_path": "LoRA", "init_args": {"rank": 4}}
    code, lines = verify(changed(given, "model.init_args.lora", lora))
    assert (code, judged(lines)[2]) == (0, "ok")


@pytest.mark.parametrize(
    "kind",
    {
        "embedding": ("embed_tokens", "lm_head"),  # under either name it would be the same tensor
        "attention": ("layers.1.self_attn.q_proj",),
        "mlp": ("layers.0.mlp.down_proj",),
        "norm": ("layers.1.input_layernorm",),
        "last norm": ("model.norm",),
        "tied head": ("lm_head",),
    }.items(),
    ids=lambda kind: kind[0],
)
def test_a_weight_that_is_withheld_is_found_out(
    kind: tuple[str, tuple[str, ...]],
    verify: Verify,  # noqa: F811
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first update is whole, as what a model is loaded with is; the later ones lack one tensor."""
    updates: list[list[str]] = []

    def withholding(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
        first, left_out = not updates, []
        updates.append(left_out)
        for name, weight in named_weights(lm):
            if not first and any(part in name for part in kind[1]):
                left_out.append(name)
            else:
                yield name, weight

    monkeypatch.setattr(vllm_engine, "named_weights", withholding)
    code, lines = verify(given)
    largest, _, judgement = judged(lines)
    assert [len(left_out) for left_out in updates] == [0, len(kind[1]), len(kind[1])]
    assert (code, judgement) == (1, "FAILED")
    assert not largest <= BOUND


def test_the_gap_is_logged_in_every_iteration(given: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tokens that are trained on, and of weights that were trained: small in both iterations."""
    from tests.callbacks.test_loggers import fit

    longer: Any = changed(given, "trainer.max_epochs", 3)
    longer["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    longer["model"]["init_args"] |= {"lr_actor": 1e-3, "lr_critic": 1e-2}
    fit(longer, tmp_path, monkeypatch)
    (path,) = tmp_path.rglob("metrics.csv")
    names, *rows = (line.split(",") for line in path.read_text().splitlines())
    for name in ("mismatch/logp_gap_mean", "mismatch/logp_gap_max"):
        values = [float(row[names.index(name)]) for row in rows if row[names.index(name)]]
        assert len(values) == 3
        assert 0 < max(values) < 3e-4
