"""What of the rollouts a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_agentrl.distributed import all_gather


@dataclass
class SavedRollouts:
    """Where collecting goes on, as plain types."""

    sessions: dict[int, Any] = field(default_factory=dict)  # what :meth:`Collection.state_dict` gives
    iteration: int = 0  # iterations begun
    collected: int = 0  # rollouts
    origin: str = ""  # what the episodes follow from

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> SavedRollouts:
        return cls(state["sessions"], state["iteration"], state.get("collected", 0), state["origin"])

    def to_plain(self) -> dict[str, Any]:
        """That of all ranks; every rank must call it."""
        return {
            "sessions": {index: state for part in all_gather(self.sessions) for index, state in part.items()},
            "iteration": self.iteration,
            "collected": self.collected,
            "origin": self.origin,
        }

    def check_origin(self, origin: str) -> None:
        """Refuse to go on with other episodes than were begun.

        Raises:
            ValueError: with the keys to change.
        """
        if (self.sessions or self.collected) and self.origin != origin:
            raise ValueError(
                f"the checkpoint's environments are {self.origin}; this run has {origin}, so their "
                "episodes cannot go on: give the same data.init_args.env and seed, or start without --ckpt_path"
            )
