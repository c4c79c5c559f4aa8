"""The tiny models of the tests behave like real ones where it matters: loading, ids, chat template, determinism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import CONFIGS, tiny_model_folder, tiny_tokenizer


@pytest.fixture(params=sorted(CONFIGS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp(request.param), family=request.param)


def test_model_and_tokenizer_agree_on_ids(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) <= 400
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) < 60_000


@pytest.mark.parametrize(
    "text", ["turn left", "  two  spaces\n\nand 123", "ACTION: go forward<|im_end|>", "ünïcode 🙂"]
)
def test_ids_round_trip(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_chat_template_renders(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert [ids.count(i) for i in (1, 2)] == [3, 2]


def test_output_depends_on_the_prompt(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        a, b = (model(torch.tensor([[first, 50, 60]])).logits[0, -1].log_softmax(-1) for first in (40, 41))
    assert (a - b).abs().max() > 0.01


def test_same_seed_same_files(tmp_path: Path) -> None:
    seeds = {"a": 0, "b": 0, "c": 1}
    folders = [tiny_model_folder(tmp_path / name, vocab_words=["zebra zebra"], seed=seeds[name]) for name in seeds]
    tokenizers = [(f / "tokenizer.json").read_bytes() for f in folders]
    weights = [(f / "model.safetensors").read_bytes() for f in folders]
    assert tokenizers[0] == tokenizers[1]
    assert weights[0] == weights[1] != weights[2]
    assert len(tiny_tokenizer(["zebra zebra"])("zebra")["input_ids"]) < len(tiny_tokenizer()("zebra")["input_ids"])
