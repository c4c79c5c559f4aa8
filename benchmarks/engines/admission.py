"""The two rules by which the transformers engine admits requests: tokens per second, pair by pair.

    python -m benchmarks.engines.admission [--pairs 9] [--envs 8] [--turns 6] [--reply 32] [--every 1] [--model demo]

Both sides of a pair play the same turns: replies have fixed lengths, spread evenly from 1 to --reply tokens, and each
environment draws its seconds from a stream of its own. Which side is first alternates. There are three kinds of
environments: those that answer at once, those that take equal seconds for each step, and those of which one step in ten
takes fifty times as long. Sleeping environments compute nothing. Writes nothing. Look at the load of the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from benchmarks.engines.heavy_tail import heavy
from benchmarks.engines.setting import Delay, Setting, setting
from lightning_agentrl.engines import Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.engines.transformers.admission import Rule
from lightning_agentrl.episodes.seeds import derive_seed

RULES: tuple[Rule, Rule] = ("by_number", "as_they_come")


class FixedLengths(TransformersEngine):
    """Replies of 1 to ``longest`` tokens, by the number of the request."""

    longest = 1

    async def generate(self, request: SamplingRequest) -> Reply:
        length = 1 + derive_seed(*request.number) % self.longest
        return await super().generate(replace(request, max_tokens=length))


def tokens_per_second(made: Setting, rule: Rule, delay: Callable[[random.Random], float], turns: int) -> float:
    """Play turns of fresh episodes, after one that is not counted."""
    engine = cast(TransformersEngine, made.engine)
    engine.stop()
    engine.admission = rule
    engine.start(replace(made.handle, stop_token_ids=()))
    made.begin([Delay(i, delay) for i in range(len(made.envs))])
    made.collect(1)
    measured = made.collect(turns)
    return measured.tokens / measured.seconds


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest two values, equally far from the ends, that hold the median with at least 95 %."""
    ordered, count = sorted(values), len(values)
    outside, cut = 0.0, 0
    while cut < count // 2 and (outside := outside + 2 * math.comb(count, cut) / 2**count) <= 0.05:
        cut += 1
    return ordered[max(cut - 1, 0)], ordered[-max(cut, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6, help="of each environment, on each side of a pair")
    parser.add_argument("--reply", type=int, default=32, help="tokens of the longest reply")
    parser.add_argument("--every", type=int, default=1, help="admit_every of the engine")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a step of the environments with equal seconds")
    parser.add_argument("--model", default="demo", help="hub id, folder or demo")
    parser.add_argument("--kinds", nargs="+", default=["at_once", "equal", "heavy"], help="of environments")
    given = parser.parse_args()
    delays: dict[str, Callable[[random.Random], float]]
    delays = {"at_once": lambda _: 0.0, "equal": lambda _: given.seconds, "heavy": heavy}
    engine = FixedLengths(admit_every=given.every)
    engine.longest = given.reply
    with setting(engine, [Delay(i, heavy) for i in range(given.envs)], given.reply, given.model) as made:
        for kind in given.kinds:
            ratios = []
            print(f"environments {kind}: tokens per second {' and '.join(RULES)}, ratio, load of the last minute")
            for pair in range(given.pairs):
                load = os.getloadavg()[0]
                order = RULES if pair % 2 == 0 else RULES[::-1]
                seen = {rule: tokens_per_second(made, rule, delays[kind], given.turns) for rule in order}
                ratios.append(seen["by_number"] / seen["as_they_come"])
                both = " ".join(f"{seen[rule]:8.1f}" for rule in RULES)
                print(f"{pair:4d} {both} {ratios[-1]:6.2f} {load:5.1f}", flush=True)
            low, high = interval(ratios)
            print(
                f"{kind}: median ratio {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}), every {given.every}"
            )


if __name__ == "__main__":
    main()
