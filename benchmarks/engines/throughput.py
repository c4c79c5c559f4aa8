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
from itertools import product
from pathlib import Path

from benchmarks.engines.alone import tokens_and_seconds
from benchmarks.engines.report import RESULTS, keep
from benchmarks.engines.setting import MODEL, Delay, setting
from lightning_agentrl.engines import VLLMEngine


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
    for count, options in product(args.envs, args.engine or [{}]):
        # Asleep, vLLM would make no step for what it is asked for by itself, and be waited for without end.
        envs = [Delay(i, lambda _: 0.0) for i in range(count)]
        pairs = []
        with setting(
            VLLMEngine(max_batch=count, sleep=False, **options), envs, args.reply, args.model, args.device
        ) as made:
            made.collect(1)  # warm
            for version in range(args.repeats):
                made.engine.sync(version)
                rollout = made.collect(args.turns)
                samples = list(rollout.rollout.samples)
                tokens, alone = tokens_and_seconds(made, samples)
                tokens_in_turns, in_turns = tokens_and_seconds(made, samples, in_turns=True)
                assert tokens == tokens_in_turns == rollout.tokens
                seconds = {"rollout_seconds": rollout.seconds, "alone_seconds": alone, "in_turns_seconds": in_turns}
                pairs.append({"tokens": tokens, **seconds})
                shares = f"{alone / rollout.seconds:.3f}, in turns {in_turns / rollout.seconds:.3f}"
                print(count, options, pairs[-1], f"share {shares}", flush=True)
        record = {"envs": count, "engine": options, "turns": args.turns, "reply": args.reply, "pairs": pairs}
        keep("throughput", record, args.out)


if __name__ == "__main__":
    main()
