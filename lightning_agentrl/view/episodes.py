"""Turns grouped into episodes, and the entry of each in the list of episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_agentrl.view.read import LoggedTurn

Outcome = Literal["solved", "failed", "running"]


@dataclass(frozen=True)
class Episode:
    """The turns of one episode that are still in the log, in order."""

    turns: tuple[LoggedTurn, ...]

    @property
    def last(self) -> LoggedTurn:
        return self.turns[-1]

    @property
    def outcome(self) -> Outcome:
        """As the environment reports, else whether the return is positive; "running" if the log lacks its end."""
        if not (self.last.get("terminated") or self.last.get("truncated")):
            return "running"
        success = self.last.get("success")
        if success is None:
            success = (self.last.get("episode_return") or 0.0) > 0
        return "solved" if success else "failed"

    @property
    def mean_kl(self) -> float | None:
        """Mean log-ratio to the reference over the reply tokens, in nats; None without a reference."""
        gaps = [
            old - ref
            for turn in self.turns
            for old, ref in zip(turn.get("old_logps") or (), turn.get("ref_logps") or (), strict=False)
            if old is not None and ref is not None
        ]
        return sum(gaps) / len(gaps) if gaps else None

    def row(self) -> dict[str, Any]:
        """Return its line in the list."""
        iterations = [turn["iteration"] for turn in self.turns]
        return {
            "env": self.last["env"],
            "episode": self.last["episode"],
            "first": min(iterations),
            "last": max(iterations),
            "turns": self.last["turn"] + 1,  # of the episode so far, even if the first ones are no longer in the log
            "return": self.last.get("episode_return"),
            "outcome": self.outcome,
            "stop": self.last.get("stop"),
            "kl": self.mean_kl,
            "invalid": sum(turn.get("valid") is False for turn in self.turns),
            "capped": sum(turn.get("hit_token_cap") is True for turn in self.turns),
        }


def group(turns: Iterable[LoggedTurn]) -> list[Episode]:
    """Group turns into episodes, sorted by their last iteration, then by environment and number."""
    episodes: dict[tuple[int, int], dict[int, LoggedTurn]] = {}
    for turn in turns:
        episodes.setdefault((turn["env"], turn["episode"]), {})[turn["turn"]] = turn
    grouped = [Episode(tuple(by_number[k] for k in sorted(by_number))) for by_number in episodes.values()]
    return sorted(grouped, key=lambda e: (e.last["iteration"], e.last["env"], e.last["episode"]))
