"""The time of an update's forward and backward passes as a prefix tree, over that of padded rows, for each token mixer.

Each ratio is that of the least processor seconds of several passes of both, in turn, in one process with one thread.
Writes a section of `docs/results/speed.md`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.pages import put
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import ModelInput, Row
from tests.models.test_families import tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "results" / "speed.md"
FAMILIES = ("qwen3", "gpt_oss", "deepseek_v3", "qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2")
SIZES = {  # wide enough that matrices take most of the time, and no window shorter than a row
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "sliding_window": 1024,
}
OWN = {
    "deepseek_v3": {"head_dim": 8},  # as wide as its rotary part
    "nemotron_h": {
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "chunk_size": 64,
    },  # twice as wide
}


def shared_rows(count: int, shared: int, own: int) -> list[Row]:
    """Return rows that begin alike."""
    draw = torch.Generator().manual_seed(0)
    stem = torch.randint(3, 380, (shared,), generator=draw).tolist()
    ends = torch.randint(3, 380, (count, own), generator=draw).tolist()
    return [Row(ModelInput.of_ids([*stem, *end]), (shared + own - 2,)) for end in ends]


def chain(episodes: int, turns: int, tokens: int) -> list[Row]:
    """Return a row for each turn, which begins with all turns before."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 380, (episodes, turns * tokens), generator=draw).tolist()
    ends = range(tokens, turns * tokens + 1, tokens)
    return [Row(ModelInput.of_ids(episode[:end]), (end - 2,)) for episode in ids for end in ends]


def best_seconds(passes: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Return the least processor seconds of each, taken in turn."""
    best = [float("inf")] * len(passes)
    for _ in range(repeats):
        for number, one in enumerate(passes):
            start = time.process_time()
            one()
            best[number] = min(best[number], time.process_time() - start)
    return best


def ratio(policy: LanguageModel, rows: Sequence[Row], repeats: int) -> float:
    """Return the time as a tree over that of padded rows."""
    packed = [pack(rows, share=share) for share in (True, False)]

    def passes(number: int) -> Callable[[], None]:
        def run() -> None:
            policy.zero_grad()
            policy.hidden(packed[number]).square().sum().backward()

        return run

    tree, padded = best_seconds([passes(0), passes(1)], repeats)
    return tree / padded


TEXT = """## Prefix trees by token mixer

Processor seconds of a forward and a backward pass over a prefix tree, divided by those over padded rows: below 1, the
tree is faster. The families mix tokens by attention, delta nets, Mamba2 or convolutions. One CPU thread, float32,
random models of 4 layers of width 256, fastest of several passes, {month}; by `python -m benchmarks.speed.families`.

"""


def main() -> None:
    """Measure all families and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cases = {"8 rows, 200 of 260 tokens shared": shared_rows(8, 200, 60), "an episode of 24 turns": chain(1, 24, 50)}
    lines = [f"| family | {' | '.join(cases)} |", "|---|" + "---|" * len(cases)]
    torch.set_num_threads(1)
    for family in FAMILIES:
        torch.manual_seed(0)
        config = tiny_config(family, **SIZES, **OWN.get(family, {}))
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            policy = LanguageModel(load_causal_lm(folder)).train()
        ratios = [ratio(policy, rows, args.repeats) for rows in cases.values()]
        lines.append(f"| `{family}` | {' | '.join(f'{x:.2f}' for x in ratios)} |")
        print(lines[-1], flush=True)
    put(PAGE, "families", TEXT.format(month=time.strftime("%B %Y")) + "\n".join(lines))


if __name__ == "__main__":
    main()
