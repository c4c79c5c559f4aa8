"""How long a collection would take if nothing but engine and environments took time: a simulation of events.

    python -m benchmarks.engines.simulation

prints what admission by number costs, with seconds of a step that are assumed.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence

StepSeconds = Callable[[int, int], float]  # of one engine step, by its rows and how many of them begin in it


def simulated_seconds(
    replies: Sequence[Sequence[int]],
    delays: Sequence[Sequence[float]],
    step_seconds: StepSeconds,
    admit_every: int | None = None,
) -> float:
    """Seconds until the last environment is done.

    The engine takes whatever has come at the start of a step, reads new prompts in that step and gives every row a
    token; a reply that is whole goes to its environment at the end of the step, and the next request comes when the
    environment has taken its time.

    Args:
        replies: tokens of each reply, by environment and turn.
        delays: seconds of each environment step, likewise.
        step_seconds: what a step of the engine takes.
        admit_every: steps between two admissions, for which all who will still ask are waited for; None: no such rule.
    """
    arrivals = [(0.0, env) for env in range(len(replies))]
    turn = [0] * len(replies)
    left: dict[int, int] = {}  # tokens that the running replies still need
    now = end = 0.0
    closed = 0  # steps until the next admission
    while arrivals or left:
        if admit_every is not None and (not left or not closed):
            now, closed = max([now, *(time for time, _ in arrivals)]), admit_every
        elif not left:
            now = max(now, arrivals[0][0])
        new = 0
        while arrivals and arrivals[0][0] <= now and closed == (admit_every or 0):
            env = heapq.heappop(arrivals)[1]
            left[env] = replies[env][turn[env]]
            new += 1
        now += step_seconds(len(left), new)
        closed = max(closed - 1, 0)
        for env in [env for env, tokens in left.items() if tokens == 1]:
            done = now + delays[env][turn[env]]
            turn[env] += 1
            if turn[env] < len(replies[env]):
                heapq.heappush(arrivals, (done, env))
            end = max(end, done)
        left = {env: tokens - 1 for env, tokens in left.items() if tokens > 1}
    return end


def compare_rules(delay: Callable[[random.Random], float], envs: int, longest: int, step_seconds: StepSeconds) -> str:
    """Speed by number over speed as they come for some ``admit_every``: medians over 15 draws, of 6 turns each."""
    ratios: dict[int, list[float]] = {1: [], 8: [], 32: []}
    for draw in range(15):
        stream = random.Random(draw)
        replies = [[stream.randint(1, longest) for _ in range(6)] for _ in range(envs)]
        delays = [[delay(stream) for _ in range(6)] for _ in range(envs)]
        freely = simulated_seconds(replies, delays, step_seconds)
        for every, found in ratios.items():
            found.append(freely / simulated_seconds(replies, delays, step_seconds, every))
    return " | ".join(f"{statistics.median(found):.2f}" for found in ratios.values())


def main() -> None:
    """Compare the rules for a processor (a token of 8 rows in 0.1 s, a prompt in 0.2 s) and a GPU (0.02 s, 0.001 s)."""
    machines = {
        "a processor, 8 environments, replies of 1 to 32 tokens": (
            8,
            32,
            lambda rows, new: 0.06 + 0.005 * rows + 0.2 * new,
        ),
        "a GPU, 64 environments, replies of 1 to 200 tokens": (64, 200, lambda _, new: 0.02 + 0.001 * new),
    }
    kinds: dict[str, Callable[[random.Random], float]] = {
        "at once": lambda _: 0.0,
        "0.05 s": lambda _: 0.05,
        "0.2 s": lambda _: 0.2,
        "0.02 s, one in ten 1 s": lambda stream: 0.02 if stream.random() < 0.9 else 1.0,
    }
    for machine, (envs, longest, step_seconds) in machines.items():
        print(f"{machine}\n| a step of an environment | every 1 | every 8 | every 32 |")
        for kind, delay in kinds.items():
            print(f"| {kind} | {compare_rules(delay, envs, longest, step_seconds)} |")


if __name__ == "__main__":
    main()
