"""The memories that cells compare, by name, so that an arm is known by how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lightning_agentrl.prompts.memory import (
    ActionsOnlyMemory,
    ClearingMemory,
    Memory,
    PastTurn,
    Recollection,
    WindowMemory,
)

MemoryKind = Literal["window", "actions", "cleared"]


class Silent(Memory):
    """Another memory without the thoughts of the turns that it shows.

    Args:
        memory: that chooses the turns.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def longest(self) -> int | None:
        """The most turns that the other memory looks back."""
        return self.memory.longest

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show what the other memory shows, with actions only."""
        shown = self.memory.recall(past)
        return replace(shown, turns=tuple(replace(turn, thought="") for turn in shown.turns))


def memory_of(kind: MemoryKind, turns: int, thoughts: int = 0) -> Memory:
    """Return a memory.

    Args:
        kind: a window of the last turns; their actions alone; or all turns since the history was cleared.
        turns: of the window; of the actions; or after which the history is cleared, each time.
        thoughts: that a window shows, the newest ones; the others show none.
    """
    if kind == "window":
        return WindowMemory(turns, thoughts)
    return ActionsOnlyMemory(turns) if kind == "actions" else Silent(ClearingMemory(turns))
