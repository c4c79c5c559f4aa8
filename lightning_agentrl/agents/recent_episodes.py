"""Success in training, without favour for short episodes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.metrics.episodes import succeeded
from lightning_agentrl.types import Rollout

WINDOW = "rollout/success_window"
Began = tuple[int, int]  # rollout, and turn of the environment in it; episodes of groups begin together


class RecentEpisodes:
    """Success of the last episodes of all ranks, in the order in which they began.

    An episode counts as soon as all that began before it or with it have ended. Of those that began later, only the
    short ones have ended, and their success is not that of the policy. Of those that began together, the ones of the
    first environments are forgotten first.

    Args:
        size: episodes that count.
        enough: with fewer, nothing is said.
    """

    def __init__(self, size: int = 100, enough: int = 20) -> None:
        self.size, self.enough = size, enough
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the episodes of an earlier run, which may be of another game."""
        self._rollouts = 0
        self._running: dict[int, Began] = {}  # by environment
        # With environment and episode before the success, which must not decide what is forgotten.
        self._ended: list[tuple[Began, int, int, bool]] = []

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add the turns of a rollout, and return the share solved by name; every rank must call it."""
        own = [(t.env, t.episode, t.index, t.group is not None, t.done, succeeded(t)) for t in rollout.turns]
        turns = sorted(turn for part in all_gather(own) for turn in part)
        running = {}  # without what broke off with its environment
        for env, played in groupby(turns, itemgetter(0)):
            began = self._running.get(env, (self._rollouts, -1))
            ended = False
            for place, (_, episode, index, grouped, ended, success) in enumerate(played):
                if index == 0:
                    began = (self._rollouts, 0 if grouped else place)
                if ended:
                    self._ended.append((began, env, episode, success))
            if not ended:
                running[env] = began
        self._rollouts += 1
        self._running = running
        self._ended.sort()
        first = min(running.values(), default=(self._rollouts, 0))
        known = [success for began, _, _, success in self._ended if began < first]
        del self._ended[: max(len(known) - self.size, 0)]
        if len(known) < self.enough:
            return {}
        last = known[-self.size :]
        return {WINDOW: sum(last) / len(last)}

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts, "running": dict(self._running), "ended": list(self._ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rollouts, self._running, self._ended = state["rollouts"], dict(state["running"]), list(state["ended"])
