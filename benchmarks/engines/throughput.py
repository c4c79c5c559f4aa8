"""Tokens per second of a collected rollout, over those of vLLM alone on the same prompts and reply lengths.

The environments take no time. vLLM alone gets all prompts at once with as many rows as there are environments, which a
rollout cannot do: a prompt follows from the reply before it, and near the end fewer environments have turns left. So
vLLM alone also gets them in turns, each prompt when the reply before it has ended: what a rollout lacks of that is lost
between engine and environments.

    python -m benchmarks.engines.throughput --envs 16 --turns 8 --reply 64
    python -m benchmarks.engines.throughput --device cuda --engine '{}' --engine '{"cuda_graphs": true}'

Writes `docs/results/vllm.md` and `vllm.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.alone import tokens_and_seconds
from benchmarks.engines.busy import BusyGPU
from benchmarks.engines.report import RESULTS, keep
from benchmarks.engines.setting import MODEL, Delay, setting
from lightning_agentrl.engines import VLLMEngine


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of tokens per second, of the shares of vLLM alone, and of the time in which the GPU computes."""
    busy = [pair["gpu_busy"] for pair in pairs if pair["gpu_busy"] is not None]
    return {
        "tokens/s": median(pair["tokens"] / pair["rollout_seconds"] for pair in pairs),
        "of bare vLLM": median(pair["alone_seconds"] / pair["rollout_seconds"] for pair in pairs),
        "of bare vLLM in turns": median(pair["in_turns_seconds"] / pair["rollout_seconds"] for pair in pairs),
        "GPU computes": median(busy) if busy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--reply", type=int, default=64, help="tokens at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--engine", type=json.loads, action="append", help="arguments of VLLMEngine, one or several times"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the records")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for count, options in product(args.envs, args.engine or [{}]):
        # Asleep, vLLM would make no step for what it is asked for by itself, and be waited for without end.
        envs = [Delay(i, lambda _: 0.0) for i in range(count)]
        pairs = []
        engine = VLLMEngine(max_batch=count, sleep=False, **options)
        with BusyGPU() as gpu, setting(engine, envs, args.reply, args.model, args.device) as made:
            made.collect(1)  # warm
            for version in range(args.repeats):
                made.engine.sync(version)
                rollout = made.collect(args.turns)
                used = gpu.between(time.time() - rollout.seconds, time.time())
                samples = list(rollout.rollout.samples)
                tokens, alone = tokens_and_seconds(made, samples)
                tokens_in_turns, in_turns = tokens_and_seconds(made, samples, in_turns=True)
                assert tokens == tokens_in_turns == rollout.tokens
                seconds = {"rollout_seconds": rollout.seconds, "alone_seconds": alone, "in_turns_seconds": in_turns}
                pairs.append({"tokens": tokens, "gpu_busy": used and used.share, **seconds})
                shares = f"{alone / rollout.seconds:.3f}, in turns {in_turns / rollout.seconds:.3f}"
                print(count, options, pairs[-1], f"share {shares}", flush=True)
        found[json.dumps(options)] = summary(pairs)
        record = {"envs": count, "engine": options, "turns": args.turns, "reply": args.reply, "pairs": pairs}
        keep("throughput", record, args.out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
