"""What a contender is asked to do, and how it talks with the program that compares. For every environment."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.speed.layouts import Case, Row, episode_rows, turn_rows


@dataclass(frozen=True)
class Job:
    """One contender in one setting; every contender takes all of its numbers from here."""

    case: Case
    turns: int
    model: str  # folder
    precision: str  # "bf16": float32 weights under autocast; "float32"
    micro_batch: int  # tokens or rows, as the contender counts
    variant: str = ""  # of the contender
    episodes: bool = False  # one row for each episode instead of each turn
    threads: int = 2
    device: str = "cpu"  # or "cuda", the first one that is seen
    lr: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    checkpointing: bool = False  # ours only, as adapters are
    lora: bool = False

    def rows(self) -> list[Row]:
        return (episode_rows if self.episodes else turn_rows)(self.case, self.turns)

    def dumps(self) -> str:
        return json.dumps(asdict(self))


class Channel:
    """The contender's end: it sleeps in a read until the next step is asked for.

    Made before the model is loaded: memory is counted from here. Answers go to what was standard output; whatever
    libraries print goes to standard error.

    Args:
        device: that it computes on; a clock is stopped when its work is done.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._program_bytes = peak_bytes(device)
        self._told_ready = False

    def wait(self) -> bool:
        """Sleep until a step is asked for, then start the clock; False when there is nothing more to do."""
        if not self._told_ready:
            print("{}", file=self._answers, flush=True)
            self._told_ready = True
        before = time.process_time()
        line = sys.stdin.readline()
        self._idle_cpu = time.process_time() - before
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        return bool(line.strip())

    def stop(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        self._seconds = time.perf_counter() - self._started
        self._cpu_seconds = time.process_time() - self._cpu_started

    def answer(self, loss: float, grad_norm: float, **more: object) -> None:
        """Tell the time between the last ``wait`` and ``stop``, and two numbers that show what was computed."""
        answer = {
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "idle_cpu": self._idle_cpu,
            "loss": loss,
            "grad_norm": grad_norm,
            "peak_bytes": peak_bytes(self._device) - self._program_bytes,
            **more,
        }
        print(json.dumps(answer), file=self._answers, flush=True)


def own_job() -> Job:
    """The job in this process's argument."""
    fields = json.loads(sys.argv[1])
    return Job(**{**fields, "case": Case(**fields["case"])})


def peak_bytes(device: str) -> int:
    """The most memory that this process has held so far, of a GPU that of its tensors."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
