"""The recorder: collects the turns of one session into samples and says when there are enough."""

from __future__ import annotations

from collections.abc import Callable

from lightning_agentrl.rollout.session import Prompt
from lightning_agentrl.types import Sample, Segment, Turn


class Recorder:
    """Records until a number of turns, or one whole episode, is there.

    Args:
        turns: turns to record; None records until the episode ends.
        grows: put the turns of one episode into one growing sample instead of one sample each.
        on_turn: called after each turn.
    """

    def __init__(self, turns: int | None, grows: bool, on_turn: Callable[[], None] = lambda: None) -> None:
        self.turns_left = turns
        self.grows = grows
        self._on_turn = on_turn
        self._samples: list[tuple[list[Segment], list[Turn]]] = []

    @property
    def full(self) -> bool:
        if self.turns_left is not None:
            return self.turns_left == 0
        return bool(self._samples) and self._samples[-1][1][-1].done

    @property
    def at_last_turn(self) -> bool:
        """The next recorded turn is the last one wanted, so the recursion is cut after it."""
        return self.turns_left == 1

    def record(self, prompt: Prompt, action: Segment, turn: Turn) -> None:
        """Add a turn."""
        going_on = self._samples and not self._samples[-1][1][-1].done
        if self.grows and going_on:
            segments, turns = self._samples[-1]
            segments += [*prompt.new, action]
            turns.append(turn)
        else:
            self._samples.append(([prompt.as_segment(), action], [turn]))
        if self.turns_left is not None:
            self.turns_left -= 1
        self._on_turn()

    def samples(self) -> list[Sample]:
        return [Sample(tuple(segments), tuple(turns)) for segments, turns in self._samples]
