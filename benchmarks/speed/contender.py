"""The comparing program's end: a contender in a process of its own that makes a step when asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.speed.job import Job

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / ".venv-trl" / "bin" / "python"  # without it, TRL may be installed beside us
OF_TRL = str(TRL) if TRL.exists() else sys.executable
PYTHONS = {"ours": sys.executable, "plain": sys.executable, "trl_grpo": OF_TRL, "trl_tree": OF_TRL}


@dataclass(frozen=True)
class Step:
    """One optimizer step of a contender."""

    seconds: float
    cpu_seconds: float  # of all threads together; fewer than seconds * threads where something else ran, or one thread
    idle_cpu: float  # seconds of CPU used while it waited before the step: others were measured then
    loss: float
    grad_norm: float
    peak_bytes: int  # the most memory of the process so far, without that of the program itself
    largest_logits: int = 0  # bytes of the largest tensor over the vocabulary, where asked for
    note: str = ""  # how it was computed


class Contender:
    """A worker process, which begins to load its model at once; use it as a context.

    Args:
        module: `ours`, `plain` or `trl_grpo`, the file next to this one.
        job: what it is asked to do.
    """

    def __init__(self, module: str, job: Job) -> None:
        self.module, self.job = module, job
        self.is_ready = False

    def __enter__(self) -> Contender:
        threads = str(self.job.threads)
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        # Models are folders. Of several GPUs, transformers would share the batch out over all.
        own = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": first if self.job.device == "cuda" else ""}
        self.log = Path(os.devnull).open("w") if not os.environ.get("SPEED_LOG") else None
        self.process = subprocess.Popen(
            [PYTHONS[self.module], "-m", f"benchmarks.speed.{self.module}", self.job.dumps()],
            cwd=ROOT,
            env={**os.environ, **own, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()
        if self.log is not None:
            self.log.close()

    def leave(self) -> None:
        """Ask the process to end, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded; others that load theirs would disturb a step."""
        if not self.is_ready:
            self._answer()
            self.is_ready = True

    def step(self) -> Step:
        """Ask for one step and wait for it."""
        self.wait_until_ready()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and so has its answer
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return Step(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"{self.module} ended without an answer to {self.job}; set SPEED_LOG=1 to see its words")
        numbers: dict[str, Any] = json.loads(answer)
        return numbers
