"""How many episodes may be lost to faults of environments before the run stops, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.errors import EnvError
from lightning_agentrl.rollout.player import IN_A_ROW
from lightning_agentrl.types import Rollout, StopReason

# Episodes over which the share of lost ones is taken: the last ones, but all of a rollout, and at least so many.
WINDOW, LEAST = 100, 20


@dataclass(frozen=True)
class FaultLimits:
    """Faults of environments after which a run stops. Up to then an episode that is lost to one is counted only.

    Args:
        in_a_row: episodes that one environment may lose without a single turn between them, as where ``reset`` fails
            again and again.
        share: largest share of lost ones among the last 100 episodes of all environments, or those of the last rollout
            where it has more, from 20 episodes on.
    """

    in_a_row: int = IN_A_ROW
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"data.init_args.faults.share must lie between 0 and 1, got {self.share}")


class LostEpisodes:
    """Which of the last episodes of this run were lost.

    Args:
        share: see :class:`FaultLimits`.
        before: entries of the run that goes on.
    """

    def __init__(self, share: float, before: Iterable[bool] = ()) -> None:
        self.share = share
        self._lost = list(before)

    @property
    def entries(self) -> list[bool]:
        """Whether each of them was lost; the same on all ranks."""
        return list(self._lost)

    def add(self, rollout: Rollout) -> None:
        """Take note of a rollout; every rank must call it.

        Raises:
            EnvError: too many episodes are lost, or there is not a single turn; the same on all ranks.
        """
        parts = all_gather((_lost_and_ended(rollout), len(rollout)))
        if not any(rows for _, rows in parts):
            raise EnvError("lost", "the environments failed in all groups of this rollout")
        added = [one for part, _ in parts for one in part]  # by rank and environment, so none of them is left out
        self._lost = (self._lost + added)[-max(WINDOW, len(added)) :]
        lost, seen = sum(self._lost), len(self._lost)
        if seen >= LEAST and lost > self.share * seen:
            raise EnvError(
                "lost",
                f"{lost} of the last {seen} episodes were lost to faults of their environments, more than the share of "
                f"{self.share:g} that data.init_args.faults.share allows; the warnings before say which faults",
            )


def _lost_and_ended(rollout: Rollout) -> list[bool]:
    """Return an entry for each episode: True if it was lost, False if it ended otherwise."""
    episodes: list[bool] = []
    for turn in rollout.turns:
        episodes += [True] * len(turn.lost)
        if turn.done and turn.stop is not StopReason.ENV_FAULT:
            episodes.append(False)
    return episodes
