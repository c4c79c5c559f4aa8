"""What it saves that an image is read once: an update of 16 turns that share one, against the same turns apart.

    python -m benchmarks.vision.shared_images              # time, paired
    python -m benchmarks.vision.shared_images --memory     # of an episode of 20 turns in 32,000 tokens

Both ways compute the same gradients, which is checked first. Rounds alternate, and a ratio is of the two times of one
round. The model is random, with the proportions of a real one.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.intervals import T_QUANTILES
from lightning_agentrl.models.kernels import checkpoint_activations
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.models.vision import tower
from lightning_agentrl.types import ModelInput, Row
from tests.tiny import tiny_vision_folder

TURNS, ROUNDS = 16, 6
PROMPT, REPLY, IMAGE = 60, 24, 192  # text tokens of a prompt, of a reply; side of the image in pixels
EPISODE, SEEN, TOLD, SAID = 20, 1024, 380, 192  # turns; tokens of each: image, text, reply; about 32,000 together


def policy(train_tower: bool, **settings: int) -> LanguageModel:
    with tempfile.TemporaryDirectory() as folder:
        tiny_vision_folder(
            Path(folder),
            "qwen3_vl",
            initializer_range=0.02,
            max_position_embeddings=40_000,
            image_tokens=2048,
            **settings,
        )
        made = LanguageModel(load_causal_lm(folder)).train()
    for part in tower(made.lm).values():
        part.requires_grad_(train_tower)
    return made


def text(draw: np.random.Generator, count: int) -> ModelInput:
    return ModelInput.of_ids([int(token) for token in draw.integers(20, 300, count)])


def seen(policy: LanguageModel, draw: np.random.Generator, side: int) -> ModelInput:
    assert policy.image_reader is not None
    return policy.image_reader.read(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))


def gradients(policy: LanguageModel, batches: Iterable[Sequence[Row]]) -> None:
    policy.zero_grad()
    for rows in batches:
        packed = pack(rows, reader=policy.image_reader)
        policy.token_scores(policy.hidden(packed), packed.targets, 1.0).logps.sum().backward()


def compare(train_tower: bool) -> None:
    model = policy(train_tower, hidden_size=128, layers=4, head_dim=32, tower_size=96, tower_layers=3)
    draw = np.random.default_rng(0)
    prompt = text(draw, PROMPT // 2) + seen(model, draw, IMAGE) + text(draw, PROMPT // 2)
    reads = tuple(range(len(prompt) - 1, len(prompt) + REPLY - 1))
    rows = [Row(prompt + text(draw, REPLY), reads) for _ in range(TURNS)]
    ways = {"together": [rows], "apart": [[row] for row in rows]}
    found = {}
    for name, batches in ways.items():  # also warms up
        gradients(model, batches)
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    worst = float((found["together"] - found["apart"]).abs().max() / found["apart"].abs().max())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in sorted(ways, reverse=number % 2 == 1):
            started = time.perf_counter()
            gradients(model, ways[name])
            times[name].append(time.perf_counter() - started)
    ratios = [apart / together for apart, together in zip(times["apart"], times["together"], strict=True)]
    half = T_QUANTILES[ROUNDS - 2] * statistics.stdev(ratios) / ROUNDS**0.5
    print(
        f"{TURNS} turns of {len(prompt)} + {REPLY} tokens, tower {'trained' if train_tower else 'frozen'}: together "
        f"{statistics.median(times['together']):.2f} s, apart {statistics.median(times['apart']):.2f} s; "
        f"{statistics.mean(ratios):.1f} times as fast (95 %: {statistics.mean(ratios) - half:.1f} to "
        f"{statistics.mean(ratios) + half:.1f}); gradients differ by {worst:.0e} of the largest"
    )


def episode(recompute: bool) -> None:
    """Compute the gradient of one growing sample; say what it took beyond the model."""
    model = policy(False, hidden_size=128, layers=3, head_dim=32, tower_size=64, tower_layers=1)
    if recompute:
        checkpoint_activations(model.lm)
    draw = np.random.default_rng(0)
    whole, reads = ModelInput(), list[int]()
    for _ in range(EPISODE):
        whole = ModelInput.join([whole, seen(model, draw, 512), text(draw, TOLD)])
        reads += range(len(whole) - 1, len(whole) + SAID - 1)
        whole += text(draw, SAID)
    before, started = _peak(), time.perf_counter()
    gradients(model, [[Row(whole, tuple(reads))]])
    print(
        f"{EPISODE} turns, {len(whole)} tokens, {len(whole.images)} images of {whole.images[0].tokens} tokens, "
        f"activations {'recomputed' if recompute else 'kept'}: {_peak() - before:.2f} GB beyond the model and the "
        f"pixels, {time.perf_counter() - started:.0f} s"
    )


def _peak() -> float:
    """Return the most memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--episode", choices=("kept", "recomputed"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.episode:
        episode(given.episode == "recomputed")
    elif given.memory:
        for kind in ("kept", "recomputed"):  # each in a process of its own, since the most memory never falls
            subprocess.run([sys.executable, "-m", "benchmarks.vision.shared_images", "--episode", kind], check=True)
    else:
        for trained in (False, True):
            compare(trained)
