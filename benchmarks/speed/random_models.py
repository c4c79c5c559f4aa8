"""Random models of published shapes for machines that reach no model hub, and a tiny one for trials.

    python -m benchmarks.speed.random_models 0.6B FOLDER

The vocabulary has the published size. Every id decodes: ids beyond the small tokenizer are words of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tests.tiny import tiny_tokenizer

TINY = "tiny"
CONTEXT = 131_072
SHAPES: dict[str, dict[str, Any]] = {  # as in the config.json of each
    TINY: {
        "vocab_size": 40_960, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "0.6B": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "4B": {
        "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip


def wide_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the tests, with words up to a vocabulary of this size."""
    tokenizer = tiny_tokenizer()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] |= {f"<word{i}>": i for i in range(len(tokenizer), size)}
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "chat_template")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), **special)


def write_model(size: str, folder: Path) -> None:
    """Write the model and its tokenizer, unless they are there."""
    if (folder / "tokenizer.json").exists():
        return
    shape = SHAPES[size]
    tokenizer = wide_tokenizer(shape["vocab_size"])
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = Qwen3Config(**shape, **ids, max_position_embeddings=CONTEXT, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=tuple(SHAPES))
    parser.add_argument("folder", type=Path)
    wanted = parser.parse_args()
    write_model(wanted.size, wanted.folder)


if __name__ == "__main__":
    main()
