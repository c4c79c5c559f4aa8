"""Where requests go if many ranks share many servers, each knowing of its own requests only: a simulation.

    python -m benchmarks.engines.routing

compares ranks that prefer the same server with ranks that prefer different ones. It uses the engine's own rule.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_agentrl.engines.vllm_server.routing import choose, common_blocks, preferred

COMMON, OWN = 8, 4  # blocks of the beginning that all prompts have, and those that an episode grows by in a turn
TURNS, LONGEST = 8, 32  # of an episode; the time of a reply is 1 to this
Order = Callable[[int, int, int], Sequence[int]]


def same(rank: int, ranks: int, servers: int) -> Sequence[int]:
    """As before: all ranks begin with the first server."""
    return range(servers)


@dataclass
class Found:
    """What a simulation tells."""

    at_first: list[int] = field(default_factory=list)  # requests of each server once all have asked for the first time
    busiest: list[float] = field(default_factory=list)  # load of the busiest server over the mean load, by request
    moved: int = 0  # requests that did not go to the server of the turn before
    read_again: int = 0  # blocks that their server had not read, though another one had
    blocks: int = 0


class Rank:
    """What one rank knows of the servers."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self.read: list[set[int]] = [set() for _ in order]
        self.in_flight = [0] * len(order)

    def choose(self, keys: Sequence[int], used: set[int]) -> int:
        order = [server for server in self.order if server in used]
        common = [common_blocks(keys, self.read[server]) for server in order]
        return order[choose(len(keys), common, [self.in_flight[server] for server in order])]


def simulated(ranks: int, envs: int, servers: int, order: Order, seed: int = 0, lost: int | None = None) -> Found:
    """Play an episode in every environment.

    Args:
        ranks: processes of the trainer.
        envs: environments of each.
        servers: servers that all of them use.
        order: in which a rank prefers servers, by its number, the number of ranks and that of servers.
        seed: of the times that replies take.
        lost: this server is not used after the first turn.
    """
    stream, found, used = random.Random(seed), Found(), set(range(servers))
    of_rank = [Rank(order(rank, ranks, servers)) for rank in range(ranks)]
    read: list[set[int]] = [set() for _ in range(servers)]  # by anybody
    load, place = [0] * servers, dict[tuple[int, int], int]()
    waiting = [(0.0, 0, env, rank) for env in range(envs) for rank in range(ranks)]  # all ranks begin at once
    heapq.heapify(waiting)
    while waiting:
        now, turn, env, rank = heapq.heappop(waiting)
        if turn:
            load[place[rank, env]] -= 1
            of_rank[rank].in_flight[place[rank, env]] -= 1
        if turn == TURNS:
            continue
        if turn and not found.at_first:
            found.at_first = _sizes(place, servers)
            used -= {lost}
        keys = [*range(COMMON), *(hash((rank, env, block)) for block in range(OWN * (turn + 1)))]
        server = of_rank[rank].choose(keys, used)
        found.moved += turn > 0 and place[rank, env] != server
        had = [common_blocks(keys, each) for each in read]
        found.read_again += max(had) - had[server]
        found.blocks += len(keys)
        place[rank, env] = server
        load[server] += 1
        of_rank[rank].in_flight[server] += 1
        of_rank[rank].read[server].update(keys)
        read[server].update(keys)
        if turn:
            found.busiest.append(max(load) * len(used) / sum(load))
        heapq.heappush(waiting, (now + stream.randint(1, LONGEST), turn + 1, env, rank))
    return found


def _sizes(place: dict[tuple[int, int], int], servers: int) -> list[int]:
    return [sum(found == server for found in place.values()) for server in range(servers)]


def main() -> None:
    """Print loads and what is read twice, before and after."""
    print("| ranks × environments, servers | ranks prefer | loads at first | busiest / mean | moved | read again |")
    print("|---|---|---|---|---|---|")
    for ranks, envs, servers, lost in (
        (8, 4, 4, None),
        (8, 4, 4, 0),
        (8, 16, 4, None),
        (6, 4, 4, None),
        (2, 4, 8, None),
        (1, 32, 4, None),
    ):
        for kind, order in (("the same", same), ("different", preferred)):
            found = [simulated(ranks, envs, servers, order, seed, lost) for seed in range(15)]
            busiest = statistics.mean(statistics.mean(each.busiest) for each in found)
            requests = ranks * envs * (TURNS - 1)
            moved = statistics.mean(each.moved for each in found) / requests
            again = statistics.mean(each.read_again / each.blocks for each in found)
            case = f"{ranks} × {envs}, {servers}" + ("" if lost is None else ", one of them lost")
            loads = ", ".join(map(str, found[0].at_first))
            print(f"| {case} | {kind} | {loads} | {busiest:.2f} | {moved:.0%} | {again:.0%} |")


if __name__ == "__main__":
    main()
