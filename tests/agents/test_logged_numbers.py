"""Numbers that Lightning does not move are logged as those that it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import Tensor

from lightning_agentrl.agents import agent as agent_module
from lightning_agentrl.agents import logged_numbers
from tests.agents.harness import make_agent, make_data, make_trainer


def logged(path: Path, folder: Path) -> dict[str, Tensor]:
    """What two iterations of two steps log, but for times."""
    trainer = make_trainer(path, 2)
    trainer.fit(make_agent(folder), make_data())
    return {name: value for name, value in trainer.callback_metrics.items() if not name.startswith("time/")}


@pytest.mark.slow
def test_what_is_logged_is_the_same_to_the_bit(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[object] = []

    def move(metric: result._ResultMetric, *args: object) -> result._ResultMetric:
        moves.append(metric)
        return logged_numbers._move(metric, *args)  # type: ignore[misc]

    monkeypatch.setattr(result._ResultMetric, "to", move)
    monkeypatch.setattr(agent_module, "leave_out_moves", lambda: None)
    ours = logged_numbers.leave_out_moves
    as_lightning_does = logged(tmp_path / "one", tiny_folder)
    assert len(moves) > len(as_lightning_does) > 20
    monkeypatch.setattr(agent_module, "leave_out_moves", ours)
    moves.clear()
    assert logged(tmp_path / "other", tiny_folder) == as_lightning_does
    assert not moves


def test_a_number_that_is_elsewhere_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result._ResultMetric, "to", result._ResultMetric.to)  # and is put back afterwards
    logged_numbers.leave_out_moves()
    found = result._ResultCollection(training=True)
    found.log("training_step", "loss", torch.tensor(1.0))
    metric = found["training_step.loss"]
    assert metric.to(torch.device("meta")).value.device.type == "meta"
    assert metric.cumulated_batch_size.device.type == "meta"
