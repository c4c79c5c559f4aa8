"""Tokens per second of a collected rollout, over those of vLLM alone on the same prompts and reply lengths.

The environments take no time, so what is lost is lost between the engine and them. vLLM alone gets all prompts at once
with as many rows as there are environments, which a rollout cannot do: a prompt follows from the reply before it.

    python -m benchmarks.engines.throughput --envs 16 --turns 4 --reply 32
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.engines.setting import Delay, Setting, setting
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.types import Sample


def alone(made: Setting, samples: list[Sample]) -> tuple[int, float]:
    """Tokens and seconds of vLLM's own loop."""

    def run(vllm: Any) -> tuple[int, float]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        vllm.reset_prefix_cache()
        for number, sample in enumerate(samples):
            prompt, action = sample.segments
            count = len(action.ids)
            params = SamplingParams(
                seed=number, max_tokens=count, min_tokens=count, ignore_eos=True, logprobs=0, detokenize=False
            )
            vllm.add_request(f"alone {number}", tokens_input(list(prompt.ids)), params)
        tokens, started = 0, time.perf_counter()
        while vllm.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in vllm.step() if output.finished)
        return tokens, time.perf_counter() - started

    engine = made.engine
    assert isinstance(engine, VLLMEngine)
    return engine._started()[0].call(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    envs = [Delay(i, lambda _: 0.0) for i in range(args.envs)]
    with setting(VLLMEngine(max_batch=args.envs), envs, args.reply) as made:
        made.collect(1)  # warm
        for version in range(args.repeats):
            made.engine.sync(version)
            rollout = made.collect(args.turns)
            tokens, seconds = alone(made, list(rollout.rollout.samples))
            assert tokens == rollout.tokens
            ours, theirs = tokens / rollout.seconds, tokens / seconds
            print(json.dumps({"tokens": tokens, "rollout": ours, "alone": theirs, "share": ours / theirs}), flush=True)


if __name__ == "__main__":
    main()
