"""Group logged turns into episodes, and make the row of each episode for the list of episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_agentrl.run_files import LoggedTurn

Outcome = Literal["solved", "failed", "running"]


@dataclass(frozen=True)
class Episode:
    """The logged turns of an episode, without turns that are no longer in the log.

    Args:
        turns: turns in order, at least one.
        run: index of the episode's run on the page.
    """

    turns: tuple[LoggedTurn, ...]
    run: int = 0

    @property
    def last(self) -> LoggedTurn:
        return self.turns[-1]

    @property
    def outcome(self) -> Outcome:
        """Outcome by the environment's report, or else by the return's sign; "running" if the log lacks the end."""
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
        """Return the episode's row in the list of episodes."""
        iterations = [turn["iteration"] for turn in self.turns]
        return {
            "run": self.run,
            "source": self.last.get("source"),  # name of the environment, if the run has several
            "held": is_held_out(self.last),
            "env": self.last["env"],
            "episode": self.last["episode"],
            "first": min(iterations),
            "last": max(iterations),
            "turns": self.last["turn"] + 1,  # the count includes first turns that are no longer in the log
            "return": self.last.get("episode_return"),
            "outcome": self.outcome,
            "stop": self.last.get("stop"),
            "kl": self.mean_kl,
            "invalid": sum(turn.get("valid") is False for turn in self.turns),
            "capped": sum(turn.get("hit_token_cap") is True for turn in self.turns),
        }


def is_held_out(turn: LoggedTurn) -> bool:
    return turn.get("phase") == "held_out"


def group(turns: Iterable[LoggedTurn], run: int = 0) -> list[Episode]:
    """Group turns into episodes, sorted by their last iteration, then by environment and episode index.

    Held-out episodes of different validations are separate. If an episode was played twice after the same iteration,
    for example by a resumed run, the last episode is used.
    """
    episodes: dict[tuple[Any, ...], dict[int, LoggedTurn]] = {}
    for turn in turns:
        key: tuple[Any, ...] = (turn.get("source"), turn["env"], turn["episode"])
        key += (turn["iteration"],) if is_held_out(turn) else ()
        if is_held_out(turn) and turn["turn"] == 0:
            episodes.pop(key, None)
        episodes.setdefault(key, {})[turn["turn"]] = turn
    grouped = [Episode(tuple(by_number[k] for k in sorted(by_number)), run) for by_number in episodes.values()]
    return sorted(grouped, key=lambda e: (e.last["iteration"], is_held_out(e.last), e.last["env"], e.last["episode"]))
