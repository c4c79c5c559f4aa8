"""Two processes that see: one has images where the other has text alone, and both give the weights of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.agents.processes import fit, optimizer_states, read
from tests.agents.test_fsdp2 import FSDP2
from tests.tiny import tiny_vision_folder

SOURCES = [{"id": "tests.seen_game:Corner-v0", "kwargs": {"images": images}} for images in (1, 0)]
PLAIN = "[]"  # in float32, since norms of these models compute in it whatever their weights are


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_folder(tmp_path_factory.mktemp("sees"), "qwen3_vl")


def run(path: Path, folder: Path, devices: int, *arguments: str, strategy: str | None = None) -> dict[str, Any]:
    """Two iterations; environment 0 shows pictures, environment 1 tells."""
    settings = {
        "data.init_args.env": "null",
        "data.init_args.envs": json.dumps(SOURCES),
        "data.init_args.num_envs": "2",
        "data.init_args.mini_batch_turns": "4",
        "data.init_args.validation": "null",
        "trainer.callbacks": json.dumps(
            [
                {
                    "class_path": "ModelCheckpoint",
                    "init_args": {"dirpath": str(path), "filename": "last", "save_on_train_epoch_end": True},
                }
            ]
        ),
        "trainer.max_epochs": "2",
        "model.init_args.optim.max_grad_norm_actor": "1e9",
    }
    given = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return read(fit(path, folder, "SharedCritic", devices, *given, *arguments, strategy=strategy, plugins=PLAIN))


def assert_near(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for name, weight in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], weight, rtol=0, atol=2e-4, msg=name)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one process trains, the tower too or not."""
    return lru_cache(
        lambda tower: run(tmp_path_factory.mktemp("one"), folder, 1, "--model.init_args.train_tower", tower)
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, pytest.param(FSDP2, marks=pytest.mark.long)], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("tower", ["true", pytest.param("false", marks=pytest.mark.long)], ids=["trained", "frozen"])
def test_text_beside_images(tmp_path, folder, alone, strategy, tower):
    one = alone(tower)
    two = run(tmp_path / "two", folder, 2, "--model.init_args.train_tower", tower, strategy=strategy)
    assert_near(one, two)
    before = load_file(folder / "model.safetensors")
    names = [name for name in before if ".visual." in name]
    assert names
    moved = [not torch.equal(two["state_dict"][f"actor.lm.{name}"], before[name]) for name in names]
    assert all(moved) if tower == "true" else not any(moved)
    assert len(optimizer_states(one)) == len(optimizer_states(two))
