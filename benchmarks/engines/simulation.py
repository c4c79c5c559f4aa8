"""How long a collection would take if nothing but engine and environments took time: a simulation of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

StepSeconds = Callable[[int, int], float]  # of one engine step, by its rows and how many of them begin in it


def simulated_seconds(
    replies: Sequence[Sequence[int]], delays: Sequence[Sequence[float]], step_seconds: StepSeconds
) -> float:
    """Seconds until the last environment is done.

    The engine takes whatever has come at the start of a step, reads new prompts in that step and gives every row a
    token; a reply that is whole goes to its environment at the end of the step, and the next request comes when the
    environment has taken its time.

    Args:
        replies: tokens of each reply, by environment and turn.
        delays: seconds of each environment step, likewise.
        step_seconds: what a step of the engine takes.
    """
    arrivals = [(0.0, env) for env in range(len(replies))]
    turn = [0] * len(replies)
    left: dict[int, int] = {}  # tokens that the running replies still need
    now = end = 0.0
    while arrivals or left:
        if not left:
            now = max(now, arrivals[0][0])
        new = 0
        while arrivals and arrivals[0][0] <= now:
            env = heapq.heappop(arrivals)[1]
            left[env] = replies[env][turn[env]]
            new += 1
        now += step_seconds(len(left), new)
        for env in [env for env, tokens in left.items() if tokens == 1]:
            done = now + delays[env][turn[env]]
            turn[env] += 1
            if turn[env] < len(replies[env]):
                heapq.heappush(arrivals, (done, env))
            end = max(end, done)
        left = {env: tokens - 1 for env, tokens in left.items() if tokens > 1}
    return end
