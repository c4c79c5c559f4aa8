"""How much of the time a GPU computes, and the memory it holds, as its driver reports them while others work."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from dataclasses import dataclass

QUERY = [
    "nvidia-smi",
    "--query-gpu=utilization.gpu,memory.used",
    "--format=csv,noheader,nounits",
    "-lms",
    "50",
    "-i",
    "0",
]


@dataclass(frozen=True)
class Usage:
    """Of one stretch of time: the mean share in which some kernel ran, and the most memory in GiB."""

    share: float
    gib: float


class BusyGPU:
    """Samples the first GPU twenty times a second, as a context; without `nvidia-smi` it samples nothing.

    The driver averages over a sixth of a second to a second, so a stretch should have several seconds.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []  # time.time(), share, GiB
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> BusyGPU:
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def between(self, start: float, end: float) -> Usage | None:
        """Return the usage between two times of `time.time()`; None if nothing was sampled."""
        inside = [(share, gib) for at, share, gib in self.samples if start <= at <= end]
        if not inside:
            return None
        return Usage(sum(share for share, _ in inside) / len(inside), max(gib for _, gib in inside))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            share, _, used = line.partition(",")
            if share.strip().isdigit():  # "[N/A]" where the GPU is shared out
                self.samples.append((time.time(), int(share) / 100, float(used) / 1024))
