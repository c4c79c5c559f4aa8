"""Tiny models with the chat templates of published ones, which are in tests/chat_templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.tiny import PAD, Family, tiny_model_folder, tiny_tokenizer

FOLDER = Path(__file__).with_name("chat_templates")
_CHATML = ("<|im_start|>", "<|im_end|>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>", "<eos>")
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}  # shorter than a prompt


@dataclass(frozen=True)
class Published:
    """What belongs to a template.

    Args:
        family: of the model that is made with it.
        special: tokens of the template, besides `bos` and the padding.
        eos: the token that ends a text.
        bos: the token that begins one, if the template writes it.
        settings: of the model's config.
        folds: it has no system role.
        rewrites: words from how it rewrites a conversation; empty: it only appends.
    """

    family: Family
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    folds: bool = False
    rewrites: str = ""


TEMPLATES = {
    "gemma2": Published("llama", _GEMMA, "<eos>", "<bos>", folds=True),
    "gemma3": Published("gemma3_text", _GEMMA, "<eos>", "<bos>", _WINDOWS | {"query_pre_attn_scalar": 8}),
    "qwen2_5": Published("qwen2", _CHATML, "<|im_end|>"),
    "qwen3": Published("qwen3", (*_CHATML, "<think>", "</think>"), "<|im_end|>", rewrites="rewrites earlier messages"),
    "llama3": Published(
        "llama", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", "<|begin_of_text|>"
    ),
    # A system text is written into the last message, and only if that is the user's.
    "mistral_v3": Published(
        "mistral", ("[INST]", "[/INST]", "</s>"), "</s>", "<s>", {"sliding_window": 16}, folds=True
    ),
    "phi3_5": Published(
        "phi3", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), PAD, "<s>", {"sliding_window": 16}
    ),
    "deepseek_r1_distill": Published(
        "qwen2",
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        rewrites=r"writes '<think>\n' before the next reply",
    ),
}


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tiny tokenizer with the template and its special tokens."""
    published = TEMPLATES[name]
    tokenizer = tiny_tokenizer(special=[*published.special, *filter(None, [published.bos])])
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer.bos_token, tokenizer.eos_token = published.bos, published.eos
    tokenizer.name_or_path = f"models/{name}"
    return tokenizer


def published_folder(path: Path, name: str) -> Path:
    """Write a tiny model of the template's family to a folder."""
    published = TEMPLATES[name]
    return tiny_model_folder(path, published.family, tokenizer=published_tokenizer(name), **published.settings)
