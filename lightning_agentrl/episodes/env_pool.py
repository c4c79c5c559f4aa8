"""Pool of a rank's environments: assigns sources to environment indices and keeps idle environments."""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import accumulate

import torch

from lightning_agentrl.episodes.env_worker import EnvWorker, close_all
from lightning_agentrl.episodes.sources import Source
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.stalls import waiting_for
from lightning_agentrl.types import Turn

# Golden ratio: any range of its multiples, modulo 1, fills [0, 1) evenly.
GOLDEN = (5**0.5 - 1) / 2


class EnvPool:
    """Environments of several sources in proportion to their shares; idle environments are kept and reused.

    ``names`` holds a distinct name of each source, for metrics.

    Args:
        sources: at least one source; its index is the kind of its environments.
        threads: number of threads for blocking calls, one thread for each environment that plays at the same time.
    """

    def __init__(self, sources: Sequence[Source], threads: int = 1) -> None:
        self.sources = sources
        self.threads = threads
        total = sum(source.share for source in sources)
        self.names = _unique([source.name for source in sources])
        self._bounds = [bound / total for bound in accumulate(source.share for source in sources)][:-1]
        self._idle: dict[tuple[int, bool], list[EnvWorker]] = {}  # by (kind, held out)
        self._executor: ThreadPoolExecutor | None = None

    def kind(self, number: int) -> int:
        """Return the kind of an environment or group index. Any range of indices has nearly the share of every source.

        The result does not depend on the number of ranks.
        """
        return bisect_right(self._bounds, number * GOLDEN % 1.0)

    @property
    def label(self) -> str:
        """Description of all sources and shares; with a seed, it determines an episode."""
        if len(self.sources) == 1:
            return self.sources[0].label
        return " and ".join(f"{source.label} (share {source.share:g})" for source in self.sources)

    def take(self, kind: int, held_out: bool = False) -> EnvWorker:
        """Return an idle environment, or a new environment if none is idle.

        Args:
            kind: index of the source.
            held_out: whether the environment is for held-out episodes.

        Raises:
            ValueError: the environment cannot be created; the message names the key.
        """
        idle = self._idle.get((kind, held_out))
        return idle.pop() if idle else self.sources[kind].make_worker(self.executor, held_out)

    def give_back(self, kind: int, worker: EnvWorker, held_out: bool = False) -> None:
        """Keep an environment for the next ``take``."""
        self._idle.setdefault((kind, held_out), []).append(worker)

    @property
    def executor(self) -> Executor:
        """The threads for blocking calls of environments."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="env")
        return self._executor

    def make_one_of_each(self) -> None:
        """Create and keep one environment of each source, so that errors appear before weights are loaded."""
        for kind, source in enumerate(self.sources):
            with waiting_for(f"{source.name} to be made", "setup"):
                worker = self.take(kind)
                worker.wait()
            self.give_back(kind, worker)

    def source_of(self, turn: Turn) -> str:
        """Return the name of the source that a turn of training was played in."""
        return self.names[self.kind(turn.env if turn.group is None else turn.group)]

    def start_sources(self, device: torch.device, date: RunDate) -> None:
        """Start the judges and scorers of all sources.

        Args:
            device: device of their models.
            date: date of the run, for their prompts.
        """
        for source in self.sources:
            source.date = date
            with waiting_for(f"the judge or scorer of {source.name} to start", "setup"):
                source.start(device)

    def release_sources(self) -> None:
        """Let judges and scorers release their models; an error in a user's code is only a warning."""
        for source in self.sources:
            try:
                source.release()
            except Exception as error:  # noqa: BLE001 - a user's code may raise any exception
                warnings.warn(f"release of {source.key} raised {type(error).__name__}: {error}", stacklevel=2)

    def close_held_out(self) -> None:
        """Close idle environments of held-out episodes."""
        for key in [key for key in self._idle if key[1]]:
            with waiting_for(f"held-out environments to close ({self.sources[key[0]].name})"):
                close_all(self._idle.pop(key))

    def end_threads(self) -> None:
        """Let the threads end, after their running calls. Close the pool before using it again."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def close(self) -> None:
        """Wait for running calls of environments, and close idle environments. The pool may be used again."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        close_all([worker for workers in self._idle.values() for worker in workers])
        self._idle.clear()


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names as distinct metric names: other characters become ``_``, and duplicates get a number."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w-]+", "_", name)
        numbered = (plain, *(f"{plain}_{number}" for number in range(2, len(names) + 1)))
        found.append(next(each for each in numbered if each not in found))
    return found
