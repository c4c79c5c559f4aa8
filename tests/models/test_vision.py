"""Rows with images as a prefix tree give what the model itself computes for each row, for every family that sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_agentrl.models import vision
from lightning_agentrl.models.image_reader import FamilyReader
from lightning_agentrl.models.language_model import LanguageModel, load_causal_lm
from lightning_agentrl.models.packing import Packed, Row, pack, plan_micro_batches
from lightning_agentrl.types.model_input import ImageChunk
from tests.models.seen import own_hidden, picture, rows_with_images, text
from tests.tiny import VisionFamily, tiny_vision_folder

FAMILIES = get_args(VisionFamily)
CLOSE = {"rtol": 0.0, "atol": 2e-5}  # of values to about 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: Any) -> Path:
        if family not in made:
            made[family] = tiny_vision_folder(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(folders(request.param))))


@pytest.fixture
def qwen3(folders: Callable[[str], Path]) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(folders("qwen3_vl"))))


def reader_of(policy: LanguageModel) -> FamilyReader:
    assert policy.image_reader is not None
    return policy.image_reader


def alone(policy: LanguageModel, rows: list[Row]) -> Tensor:
    return torch.cat([own_hidden(policy.lm, reader_of(policy), row) for row in rows])


def gradients(policy: LanguageModel, hidden: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    random = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * random).sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [True, False], ids=["tree", "padded"])
def test_rows_together_are_rows_alone(policy: LanguageModel, share: bool) -> None:
    rows = rows_with_images(reader_of(policy))
    packed = pack(rows, share=share, reader=policy.image_reader)
    own, together = alone(policy, rows), policy.hidden(packed)
    torch.testing.assert_close(together, own, **CLOSE)
    scores = [policy.token_scores(x, packed.targets.clamp_min(0), 1.0).logps for x in (together, own)]
    torch.testing.assert_close(*scores, **CLOSE)
    expected, found = gradients(policy, own), gradients(policy, policy.hidden(packed))
    if share:
        assert found.keys() >= expected.keys()
        assert packed.tokens < sum(len(row.input_ids) for row in rows)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-4, msg=name)


def deviation(policy: LanguageModel, packed: Packed, own: Tensor) -> float:
    with torch.no_grad():
        return float((policy.hidden(packed) - own).abs().max())
