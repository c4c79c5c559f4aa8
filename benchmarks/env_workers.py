"""Environments in processes against threads: turns per second of environments that compute, pair by pair.

    .venv/bin/python benchmarks/env_workers.py [--pairs 7] [--envs 8] [--turns 15] [--milliseconds 20] [--cores 2]

Sessions, interaction, prompts and recorders are the real ones; replies are given by an engine that follows a script, so
that nothing but environments and the trainer's own work takes time. Both sides of a pair play the same turns, one after
the other, and which of them is first alternates. Other work on the machine falsifies this: look at the load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from busy_environment import compute

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.rollout import ChatRenderer, EnvConfig, PromptFormat, Session, TurnInteraction, WindowMemory
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.fixed_turns import FixedTurns
from lightning_agentrl.rollout.player import Player

MODEL = "demo"  # of which the tokenizer alone is read


class Scripted(Engine):
    """Says the same at once, whatever it is asked."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)

    def start(self, handle: PolicyHandle) -> None:
        pass

    def sync(self, policy_version: int) -> None:
        pass

    async def generate(self, request: SamplingRequest) -> Reply:
        return Reply(self.ids, (-1.0,) * len(self.ids), closed=True, policy_version=0)

    def stop(self) -> None:
        pass


class Side:
    """Sessions of one kind of worker.

    Args:
        worker: thread or process.
        envs: how many.
        rounds: of each step.
    """

    def __init__(self, worker: str, envs: int, rounds: int) -> None:
        renderer = ChatRenderer(load_tokenizer(MODEL), PromptFormat(think=False))
        reply = (*renderer.tokenizer.encode("go", add_special_tokens=False), renderer.template.turn_close_id)
        source = EnvConfig("busy_environment:Busy-v0", {"rounds": rounds}, worker=worker)  # type: ignore[arg-type]
        self.executor, self.loop = ThreadPoolExecutor(envs), LoopThread()
        self.player = Player(TurnInteraction(8), Scripted(reply), grows=False, temperature=1.0, seed=0)
        self.sessions = [
            Session(i, source.make_worker(self.executor), lambda n, i=i: derive_seed(0, i, n), renderer, WindowMemory())
            for i in range(envs)
        ]
        self.turns_per_second(1)  # all are made

    def turns_per_second(self, turns: int) -> float:
        started = time.perf_counter()
        rollout = self.loop.run(FixedTurns(self.sessions, turns).collect(self.player))
        assert all(turn.valid and not turn.env_errors for turn in rollout.turns)
        return len(rollout.turns) / (time.perf_counter() - started)

    def close(self) -> None:
        for session in self.sessions:
            session.worker.close()
        self.loop.stop()
        self.executor.shutdown()


def rounds_of(milliseconds: float) -> int:
    """Rounds of work that take so long on this processor, by the time of the thread, not of the clock."""
    taken = []
    for _ in range(7):
        started = time.thread_time()
        compute(200_000)
        taken.append(time.thread_time() - started)
    return round(200_000 * milliseconds / 1000 / min(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15, help="of each environment, on each side of a pair")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of pure Python in each step")
    parser.add_argument("--cores", type=int, default=2)
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])  # processes of environments inherit it
    rounds = rounds_of(given.milliseconds)
    sides = {worker: Side(worker, given.envs, rounds) for worker in ("thread", "process")}
    print(f"{given.envs} environments, {given.milliseconds:g} ms of Python per step, {given.cores} cores")
    print("pair   thread  process   ratio   load of the last minute before it")
    ratios = []
    for pair in range(given.pairs):
        load = os.getloadavg()[0]
        order = list(sides) if pair % 2 == 0 else list(reversed(sides))
        seen = {worker: sides[worker].turns_per_second(given.turns) for worker in order}
        ratios.append(seen["process"] / seen["thread"])
        print(f"{pair:4d} {seen['thread']:8.1f} {seen['process']:8.1f} {ratios[-1]:7.2f} {load:7.1f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} (turns per second)")
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    main()
