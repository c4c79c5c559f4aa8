"""Progress and timing of the stages of an iteration."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_agentrl.distributed import Mean, Number

STAGES = ("collect", "score", "update", "validate", "log")
PARTS = ("sync", "forks")  # parts of stages that are also timed separately


class StageClock:
    """Clock that reports the running stage and its progress to listeners, and sums seconds, turns and tokens per stage.

    Background work in parallel to the stages is timed separately. Listeners are called with the stage, the number of
    items done and their total, in the thread that does the work.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[str, int, int], None]] = []
        self.running = ""  # the stage entered last
        self.failed_in = ""  # the stage that was ended by an error, if any
        self._done = self._total = 0
        self._read_at = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._beside: defaultdict[str, float] = defaultdict(float)
        self._turns: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._packed: Counter[str] = Counter()

    def __reduce__(self) -> tuple[type[StageClock], tuple[()]]:
        """Copy as a new clock, since the listeners belong to the run of the original."""
        return StageClock, ()

    @contextmanager
    def stage(self, name: str, total: int = 0, done: int = 0) -> Iterator[None]:
        """Time the block as part of a stage.

        Args:
            name: name of the stage.
            total: number of items in the stage; 0: unknown.
            done: number of items done before the block.
        """
        self.running, self.failed_in, self._done, self._total = name, "", done, total
        self.advance(0)
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failed_in = name
            raise
        finally:
            self._seconds[name] += time.perf_counter() - started

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block under a separate name, in addition to the running stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def advance(self, count: int = 1) -> None:
        """Report ``count`` more items of the running stage as done."""
        self._done += count
        for listener in self.listeners:
            listener(self.running, self._done, self._total)

    def count(self, name: str, turns: int, tokens: int, beside: float | None = None) -> None:
        """Count the turns and tokens that a stage has processed.

        Args:
            name: name of the stage.
            turns: number of turns.
            tokens: number of tokens in prompts and replies.
            beside: seconds that the work took in the background; None: the work was not in the background.
        """
        if beside is not None:
            self._beside[name] += beside
        self._turns[name] += turns
        self._tokens[name] += tokens

    def count_packed(self, held: int, computed: int, padding: int) -> None:
        """Count the tokens of a micro-batch in the update.

        Args:
            held: number of tokens in the rows of the micro-batch.
            computed: number of tokens that the models compute, padding included.
            padding: number of padding tokens.
        """
        self._packed.update(held=held, computed=computed, padding=padding)

    def read(self, world_size: int = 1) -> dict[str, Number]:
        """Return seconds (means over ranks) and rates (of all ranks together) since the last call, and reset both."""
        now = time.perf_counter()
        numbers: dict[str, Number] = {"time/iteration_seconds": Mean(now - self._read_at, 1)}
        for name, seconds in self._seconds.items():
            numbers[f"time/{name}_seconds"] = Mean(seconds, 1)
            if name in self._turns:
                worked = self._beside.get(name, seconds)
                numbers[f"time/{name}_turns_per_second"] = Mean(self._turns[name] * world_size, worked)
                numbers[f"time/{name}_tokens_per_second"] = Mean(self._tokens[name] * world_size, worked)
        for name, seconds in self._beside.items():
            numbers[f"time/{name}_beside_seconds"] = Mean(seconds, 1)
        if self._seconds["collect"] and self._seconds["update"]:
            numbers["time/collect_to_update"] = Mean(self._seconds["collect"], self._seconds["update"])
        if computed := self._packed["computed"]:
            held, padding = self._packed["held"], self._packed["padding"]
            numbers["time/update_shared"] = Mean(held - (computed - padding), held)
            numbers["time/update_padding"] = Mean(padding, computed)
        self._read_at = now
        self._seconds.clear()
        self._beside.clear()
        self._turns.clear()
        self._tokens.clear()
        self._packed.clear()
        return numbers
