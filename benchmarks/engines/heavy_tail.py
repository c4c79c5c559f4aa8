"""Environments of which one step in ten takes fifty times as long: collected freely, in lockstep, and by calculation.

Each environment draws its delays from its own stream, so all ways of collecting meet the same ones. By calculation:
an environment needs its own delays and replies, one after the other, and the collection the longest of these sums;
nothing can be quicker with replies of that latency. In lockstep all wait for the slowest after every turn.

    python -m benchmarks.engines.heavy_tail --envs 8 16 32 --turns 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

from benchmarks.engines.setting import Delay, Measured, Setting, setting
from lightning_agentrl.engines import TransformersEngine, VLLMEngine
from lightning_agentrl.rollout import RawParser, TurnInteraction
from lightning_agentrl.types import Turn

SHORT, LONG, OFTEN = 0.02, 1.0, 0.9
ENGINES = {"vllm": VLLMEngine, "transformers": TransformersEngine}


def heavy(stream: random.Random) -> float:
    return SHORT if stream.random() < OFTEN else LONG


class Lockstep(TurnInteraction):
    """No reply is asked for before every environment has stepped."""

    def __init__(self, reply: int, envs: int) -> None:
        super().__init__(reply, RawParser())
        self.barrier = asyncio.Barrier(envs)

    async def _play(self, *args: Any) -> Turn:
        turn = await super()._play(*args)
        await self.barrier.wait()
        return turn


def calculated(collected: Measured, envs: int) -> float:
    """Seconds of the environment that needs longest, with its delays and the latencies of its replies."""
    sums = [0.0] * envs
    for turn in collected.rollout.turns:
        sums[turn.env] += turn.engine_seconds + turn.env_seconds
    return max(sums)


def measure(made: Setting, turns: int) -> dict[str, float]:
    count = len(made.envs)
    streams = [env.random.getstate() for env in made.envs]
    free = made.collect(turns)
    for env, stream in zip(made.envs, streams, strict=True):
        env.random.setstate(stream)
    lockstep = made.collect(turns, Lockstep(made.reply, count))
    return {
        "envs": count,
        "free_seconds": free.seconds,
        "calculated_seconds": calculated(free, count),
        "lockstep_seconds": lockstep.seconds,
        "free_over_calculated": free.seconds / calculated(free, count),
        "lockstep_over_free": lockstep.seconds / free.seconds,
        "turns_per_second": count * turns / free.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--reply", type=int, default=8)
    args = parser.parse_args()
    for count in args.envs:
        envs = [Delay(i, heavy) for i in range(count)]
        with setting(ENGINES[args.engine](max_batch=count), envs, args.reply) as made:
            made.collect(1)  # warm
            print(json.dumps({"engine": args.engine} | measure(made, args.turns)), flush=True)


if __name__ == "__main__":
    main()
