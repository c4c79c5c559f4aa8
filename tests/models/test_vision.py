"""Rows with images as a prefix tree give what the model itself computes for each row, for every family that sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.models import language_model, vision
from lightning_agentrl.models.attention import tree as attention_tree
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack, plan_micro_batches
from lightning_agentrl.models.vision import FamilyReader, tower
from lightning_agentrl.types import Row
from lightning_agentrl.types.model_input import ImageChunk, ModelInput
from tests.models.seen import VISION_FAMILIES, own_hidden, picture, reader_of, rows_with_images, text
from tests.tiny import tiny_vision_folder

CLOSE = {"rtol": 0.0, "atol": 1e-4}  # of values to about 4; delta nets on some processors: 2.5e-5, mistakes: over 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: Any) -> Path:
        if family not in made:
            made[family] = tiny_vision_folder(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def policies(folders: Callable[[str], Path]) -> Callable[[str], LanguageModel]:
    """Of each family one, whose weights nobody may change."""
    return lru_cache(lambda family: LanguageModel(load_causal_lm(str(folders(family)))))


@pytest.fixture(params=VISION_FAMILIES)
def policy(request: pytest.FixtureRequest, policies: Callable[[str], LanguageModel]) -> LanguageModel:
    return policies(request.param)


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
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-5, name


def test_long_rows_see_whole_images(policies: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the depth of tiles do not reach the kernel for branches, which is causal."""
    monkeypatch.setattr(attention_tree, "TILED_DEPTH", 0)
    policy = policies("gemma3")
    rows = rows_with_images(reader_of(policy))
    together = policy.hidden(pack(rows, reader=policy.image_reader))
    torch.testing.assert_close(together, alone(policy, rows), **CLOSE)


def test_mistakes_show(policy: LanguageModel) -> None:
    """None of them is an error to the model."""
    reader = reader_of(policy)
    rows = rows_with_images(reader)
    packed, images = pack(rows, reader=reader), pack(rows, reader=reader).images
    assert images is not None
    first = images.tokens // 9  # of equal size
    swapped = images.tokens + torch.where(first == 0, 9, torch.where(first == 1, -9, 0))
    wrong = {"swapped": replace(packed, images=replace(images, tokens=swapped))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageChunk, "keys", ImageChunk.ids)
        wrong["plain ids"] = pack([Row(again(row.input), row.logit_positions) for row in rows], reader=reader)
    if reader.rotary:
        order = torch.arange(packed.ids.numel()).expand(3, 1, -1)
        wrong["positions do not restart"] = replace(packed, positions=order)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(reader), "rotary", False)
            wrong["one row of positions"] = pack(rows, reader=reader)
    if reader.bidirectional:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(reader), "bidirectional", False)
            for share in (True, False):
                wrong[f"images that see as text does, tree: {share}"] = pack(rows, share=share, reader=reader)
    with torch.no_grad():
        right = policy.hidden(packed)
        off = {name: float((policy.hidden(mistake) - right).abs().max()) for name, mistake in wrong.items()}
        if policy.lm.config.model_type == "qwen3_vl":
            whole = vision.image_features
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(language_model, "image_features", lambda *given: (whole(*given)[0], []))
                off["no features behind the first layers"] = float((policy.hidden(packed) - right).abs().max())
    print(off)  # shown if the test fails
    assert min(off.values()) > 0.3


def again(one: ModelInput) -> ModelInput:
    """The same, made now."""
    return ModelInput(tuple(replace(chunk) for chunk in one.chunks))


GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@settings(max_examples=20)
@given(pieces=st.lists(st.one_of(st.integers(1, 4), GRIDS), min_size=1, max_size=6))
def test_positions_are_those_of_the_model(
    policies: Callable[[str], LanguageModel], family: str, pieces: list[int | tuple[int, int]]
) -> None:
    policy = policies(family)
    reader = reader_of(policy)
    parts = [text(9)]  # images next to each other are one to the model, so there is text between them
    for piece in pieces:
        parts.append(text(*range(piece)) if isinstance(piece, int) else image_of(reader, *piece) + text(8))
    one = ModelInput.join(parts)
    packed = pack([Row(one, (len(one) - 1,))], reader=reader)
    grids = torch.tensor([[1, *(2 * n for n in reader.grid(image))] for image in one.images])
    expected, _ = policy.lm.base_model.get_rope_index(
        packed.ids, (packed.ids == reader.placeholder).int(), image_grid_thw=grids if one.images else None
    )
    assert packed.positions.tolist() == expected.tolist()


def image_of(reader: FamilyReader, rows: int, columns: int) -> ModelInput:
    pixels = np.zeros((rows * reader.cell, columns * reader.cell, 3), dtype=np.uint8)
    return ModelInput((reader._image(pixels),))


def test_every_different_image_is_read_once(policy: LanguageModel) -> None:
    rows = rows_with_images(reader_of(policy))
    images = pack(rows, reader=policy.image_reader).images
    assert images is not None
    different = {image.digest: image.tokens for row in rows for image in row.images}
    features, _ = vision.image_features(policy.lm, replace(images, tokens=torch.arange(sum(different.values()))))
    assert len(features) == sum(different.values()) == images.tokens.max() + 1
    assert len(images.places) > len(features)  # in the tree, the first stands in later turns again


def test_images_behind_the_last_logit_position_are_not_read(policies: Callable[[str], LanguageModel]) -> None:
    reader = reader_of(policies("qwen3_vl"))
    one = text(1, 2) + reader.read(picture(0)) + text(3)
    packed = pack([Row(one, (1,))], reader=reader)
    assert (packed.images, packed.ids.tolist()) == (None, [list(one.ids[:2])])
    assert packed.targets.tolist() == [reader.placeholder]


def test_what_cannot_be_read_is_refused(
    policies: Callable[[str], LanguageModel], tiny_folder: Path, tmp_path: Path
) -> None:
    reader = reader_of(policies("qwen3_vl"))
    image = reader.read(picture(0)).images[0]

    def row(image: ImageChunk) -> Row:
        one = text(1) + ModelInput((image,)) + text(2)
        return Row(one, (len(one) - 1,))

    with pytest.raises(ValueError, match=f"pixels of an image are missing .*{image.digest}"):
        pack([row(replace(image, pixels=None))], reader=reader)
    with pytest.raises(ValueError, match="48 x 48 pixels and 8 tokens was prepared for another model"):
        pack([row(replace(image, tokens=8))], reader=reader)
    with pytest.raises(ValueError, match="reads text only"):
        pack([row(image)], reader=LanguageModel(load_causal_lm(str(tiny_folder))).image_reader)


def test_patches_of_different_images_count_in_the_budget() -> None:
    def images(*names: str) -> ModelInput:
        return ModelInput(tuple(ImageChunk(name, 3, 10) for name in names))

    rows = [Row(images("a") + text(*range(k, k + 10)), (19,)) for k in range(3)]  # a tree of 10 + 3 * 10 tokens
    assert len(plan_micro_batches(rows, 40)) == len(plan_micro_batches(rows, 80, patches_per_token=4)) == 1
    assert len(plan_micro_batches(rows, 79, patches_per_token=4)) == 2
    others = [Row(images(name) + text(*range(10)), (19,)) for name in "abc"]  # 20 + 40 each
    assert [len(plan_micro_batches(others, n, patches_per_token=4)) for n in (180, 179, 119)] == [1, 2, 3]
    assert [len(plan_micro_batches(others, n, False, 4)) for n in (180, 179, 119)] == [1, 2, 3]
    assert len(plan_micro_batches(rows, 60 + 40, False, 4)) == 1


def test_a_tower_that_is_trained_has_gradients_without_images(policy: LanguageModel) -> None:
    reader = reader_of(policy)
    plain = [Row(text(1, 2, 3, 4), (2, 3))]
    expected = gradients(policy, policy.hidden(pack(plain, reader=reader)))
    fed = pack(plain, reader=reader, feed_tower=True)
    torch.testing.assert_close(policy.hidden(fed), policy.hidden(pack(plain, reader=reader)), **CLOSE)
    found = gradients(policy, policy.hidden(fed))
    towers = {name for name in dict(policy.named_parameters()) if any(f".{part}." in name for part in tower(policy.lm))}
    assert towers
    assert found.keys() - expected.keys() == towers
    assert not any(found[name].any() for name in found.keys() & towers)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE)


def test_mixed_rows_have_the_gradients_of_rows_apart(policy: LanguageModel) -> None:
    """Rows of text alone beside rows with images."""
    reader = reader_of(policy)
    rows = rows_with_images(reader)
    total = gradients(policy, policy.hidden(pack(rows, reader=reader)))
    policy.zero_grad()
    random = torch.randn(
        (sum(len(row.logit_positions) for row in rows), policy.hidden_size), generator=torch.Generator().manual_seed(0)
    )
    for row, part in zip(rows, random.split([len(row.logit_positions) for row in rows]), strict=True):
        (policy.hidden(pack([row], reader=reader)) * part).sum().backward()
    for name, gradient in total.items():
        torch.testing.assert_close(policy.get_parameter(name).grad, gradient, rtol=1e-4, atol=2e-4, msg=name)
