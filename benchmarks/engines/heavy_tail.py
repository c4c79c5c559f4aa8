"""Environments of which one step in ten takes fifty times as long: collected freely, in lockstep, and as simulated.

Each environment draws its delays from its own stream, so all ways of collecting meet the same ones. The simulation
gets these delays, the lengths of the sampled replies, and the seconds of the engine's steps, which are measured with
vLLM alone just before. In lockstep all wait for the slowest after every turn.

    python -m benchmarks.engines.heavy_tail --envs 8 16 32 --turns 16

Writes `docs/results/vllm.md` and `vllm.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

from benchmarks.engines.alone import measured_step_seconds
from benchmarks.engines.report import keep
from benchmarks.engines.setting import Delay, Setting, setting
from benchmarks.engines.simulation import simulated_seconds
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.rollout import RawParser, TurnInteraction
from lightning_agentrl.types import Rollout, Turn

SHORT, LONG, OFTEN = 0.02, 1.0, 0.9


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


def reply_lengths(rollout: Rollout, envs: int) -> list[list[int]]:
    """Tokens by environment and turn."""
    lengths: list[list[int]] = [[] for _ in range(envs)]
    for sample in rollout.samples:
        (turn,) = sample.turns
        lengths[turn.env].append(len(sample.segments[-1].ids))
    return lengths


def measure(made: Setting, turns: int) -> dict[str, float]:
    count = len(made.envs)
    prompts = [sample.segments[0].ids for sample in made.collect(1).rollout.samples]
    step_seconds = measured_step_seconds(made, prompts)
    streams = [env.random.getstate() for env in made.envs]
    free = made.collect(turns)
    delays = [env.delays[-turns:] for env in made.envs]
    ideal = simulated_seconds(reply_lengths(free.rollout, count), delays, step_seconds)
    for env, stream in zip(made.envs, streams, strict=True):
        env.random.setstate(stream)
    lockstep = made.collect(turns, Lockstep(made.reply, count))
    assert [env.delays[-turns:] for env in made.envs] == delays
    return {"free_seconds": free.seconds, "ideal_seconds": ideal, "lockstep_seconds": lockstep.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--reply", type=int, default=8, help="tokens at most")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for count in args.envs:
        envs = [Delay(i, heavy) for i in range(count)]
        with setting(VLLMEngine(max_batch=count), envs, args.reply) as made:
            runs = []
            for _ in range(args.repeats):
                runs.append(measure(made, args.turns))
                print(count, runs[-1], flush=True)
        keep("heavy_tail", {"envs": count, "turns": args.turns, "reply": args.reply, "runs": runs})


if __name__ == "__main__":
    main()
