"""Where an iteration is, and how long each stage took."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STAGES = ("collect", "score", "update", "validate")


class StageClock:
    """Names the running stage to listeners and adds up seconds, turns and tokens per stage until read."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._turns: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as part of stage ``name``."""
        if name not in STAGES:
            raise ValueError(f"stage '{name}' is none of {STAGES}")
        for listener in self.listeners:
            listener(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def count(self, name: str, turns: int, tokens: int) -> None:
        """Say how much stage ``name`` worked through. Tokens are those of the samples: prompt and reply."""
        self._turns[name] += turns
        self._tokens[name] += tokens

    def read(self) -> dict[str, float]:
        """Seconds and rates by stage since the last reading, which is then forgotten."""
        numbers: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            numbers[f"time/{name}_seconds"] = seconds
            if seconds and self._turns[name]:
                numbers[f"time/{name}_turns_per_second"] = self._turns[name] / seconds
                numbers[f"time/{name}_tokens_per_second"] = self._tokens[name] / seconds
        self._seconds.clear()
        self._turns.clear()
        self._tokens.clear()
        return numbers
