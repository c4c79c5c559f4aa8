"""Random models of the sizes of the report: tiny ones for a trial, real sizes where no hub can be reached.

    python -m benchmarks.gpu_report.models 0.5B FOLDER

The tokenizer is that of the demo model, and so is the vocabulary: a model must not sample what nobody can decode.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks.counted_memory import SIZES
from benchmarks.gpu_report.parts import TINY
from lightning_agentrl.models.demo import demo_model_folder
from tests.tiny import tiny_model_folder

CONTEXT = 4096


def write_model(size: str, folder: Path) -> int:
    """Write a random model with its tokenizer; return its number of parameters."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    if size == TINY:
        tiny_model_folder(folder, head_dim=32, tokenizer=tokenizer)
        return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    settings = SIZES[size].to_dict() | {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    settings |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**settings), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=(TINY, *SIZES))
    parser.add_argument("folder", type=Path)
    wanted = parser.parse_args()
    print(f"{write_model(wanted.size, wanted.folder) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
