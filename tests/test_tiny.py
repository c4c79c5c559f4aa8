"""The tiny models of the tests behave like real ones where it matters: loading, ids, chat template, determinism."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.models.seen import VISION_FAMILIES
from tests.tiny import CONFIGS, VisionFamily, tiny_model_folder, tiny_vision_folder


@pytest.fixture(params=sorted(CONFIGS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp(request.param), family=request.param)


def test_output_depends_on_the_prompt(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        a, b = (model(torch.tensor([[first, 50, 60]])).logits[0, -1].log_softmax(-1) for first in (40, 41))
    assert (a - b).abs().max() > 0.01


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_models_see(family: VisionFamily, tmp_path: Path) -> None:
    folder = tiny_vision_folder(tmp_path, family)
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    content = [{"type": "image"}, {"type": "text", "text": "go"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text.endswith("go" + tokenizer.eos_token + "\n")
    mark = lm.config.boi_token_id if family == "gemma3" else lm.config.image_token_id
    assert tokenizer(text)["input_ids"].count(mark) == 1
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert sum(p.numel() for p in lm.parameters()) < 400_000
    random = np.random.default_rng(0)
    settings = {"do_image_splitting": False} if family in ("smolvlm", "idefics3") else {}
    features = []
    for _ in range(2):
        image = random.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        patches = dict(processor(images=[image], return_tensors="pt", **settings))
        for name in ("pixel_attention_mask", "num_crops"):
            patches.pop(name, None)
        features.append(torch.cat(list(lm.base_model.get_image_features(**patches).pooler_output)))
    assert features[0].shape == (9, 64)
    assert (features[0] - features[1]).abs().mean() > 0.1 * features[0].abs().mean()
