"""What a precision does to weights that are not trained, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents import models as models_module
from lightning_agentrl.engines import transformers
from lightning_agentrl.engines import weights as weights_module
from tests.agents.harness import make_agent, make_data, make_trainer

pytestmark = pytest.mark.slow


class KeepSampled(L.Callback):
    """Keeps what linear layers of the engine's policy are stored in."""

    dtypes: set[torch.dtype]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine: Any = trainer.datamodule.engine  # type: ignore[attr-defined]
        assert isinstance(engine, transformers.engine.TransformersEngine)
        assert engine._batch is not None
        self.dtypes = stored_in(engine._batch.policy)


def stored_in(model: nn.Module | None) -> set[torch.dtype]:
    assert model is not None
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name}
    return {layer.weight.dtype for layer in layers.values()}


def run(path: Path, folder: Path, ahead: int) -> tuple[PPOAgent, set[torch.dtype], Mapping[str, Tensor]]:
    """Three iterations: the agent, what the engine has stored linear layers in, and what was logged but for times."""
    agent, keep = make_agent(folder), KeepSampled()
    trainer = make_trainer(path, 3, [keep], precision="bf16-mixed")
    trainer.fit(agent, make_data(max_staleness=ahead))
    logged = {name: x for name, x in trainer.callback_metrics.items() if not name.startswith("time/")}
    return agent, keep.dtypes, logged


@pytest.mark.parametrize("ahead", [0, 1])
def test_with_rounded_weights_a_run_is_the_same_to_the_bit(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    agent, sampled, logged = run(tmp_path / "rounded", tiny_folder, ahead)
    assert stored_in(agent.models.reference) == {torch.bfloat16}
    assert sampled == {torch.bfloat16 if ahead else torch.float32}  # the policy itself, or its copy
    assert stored_in(agent.actor) == {torch.float32}
    for module in (models_module, weights_module):
        monkeypatch.setattr(module, "round_linear_layers", lambda *_, **__: None)
    other, sampled, as_before = run(tmp_path / "whole", tiny_folder, ahead)
    assert stored_in(other.models.reference) == sampled == {torch.float32}
    assert logged == as_before
    assert all(torch.equal(a, b) for a, b in zip(agent.parameters(), other.parameters(), strict=True))


def test_a_run_with_another_precision_needs_another_agent(tmp_path: Path, tiny_folder: Path) -> None:
    agent, data = make_agent(tiny_folder), make_data()
    make_trainer(tmp_path, 1, precision="bf16-mixed").fit(agent, data)
    make_trainer(tmp_path, 1, precision="bf16-mixed").fit(agent, data)
    make_trainer(tmp_path, 1, precision="32-true").validate(agent, data, verbose=False)  # which reads no reference
    with pytest.raises(ValueError, match=r"rounded.*trainer\.precision.*bf16-mixed.*32-true needs a new agent"):
        make_trainer(tmp_path, 1, precision="32-true").fit(agent, data)


class KeepDefault(L.Callback):
    """Keeps torch's default dtype, which all threads share, as other callbacks find it."""

    def __init__(self) -> None:
        self.found: set[torch.dtype] = set()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.add(torch.get_default_dtype())


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_the_default_dtype_stays_while_an_engine_samples(tmp_path: Path, tiny_folder: Path, precision: str) -> None:
    keep = KeepDefault()
    make_trainer(tmp_path, 3, [keep], precision=precision).fit(make_agent(tiny_folder), make_data(max_staleness=1))
    assert keep.found == {torch.get_default_dtype()} == {torch.float32}
