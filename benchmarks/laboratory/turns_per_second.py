"""Turns per second of whole iterations, against an older version of this repository, with models where overhead is all.

    git worktree add ../older COMMIT
    python -m benchmarks.laboratory.turns_per_second --against ../older

Both versions train the same model in the same game, each in a process of its own, and take iterations by turns, so that
neighbours in time make a ratio. Writes `docs/results/turns_per_second.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.laboratory.cloning import Start, cloned
from benchmarks.laboratory.turnstile import ENVS, TURNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "turns_per_second.md"
FIRST = 3  # iterations that do not count: memory and remembered prompts


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        words: of a reply.
        shared: the critic reads the policy's own hidden states.
    """

    words: int
    shared: bool = False

    @property
    def name(self) -> str:
        said = "1 word" if self.words == 1 else f"{self.words} words"
        return said + (", shared critic" if self.shared else "")


CASES = (Case(1), Case(1, shared=True), Case(8), Case(32))


@dataclass
class Times:
    """Seconds of iterations, of the clock and of the processor."""

    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="folder of another version of this repository")
    parser.add_argument("--iterations", type=int, default=60, help="of each version in each case")
    parser.add_argument("--words", type=int, nargs="+", help="only cases with replies of so many words")
    wanted = parser.parse_args()
    if not (wanted.against / "lightning_agentrl").is_dir():
        raise SystemExit(f"--against {wanted.against} is no clone of this repository")
    measured = {}
    for case in CASES:
        if wanted.words is None or case.words in wanted.words:
            measured[case] = compared(case, wanted.against.resolve(), wanted.iterations)
            print(*row(case, *measured[case]), sep=" | ", flush=True)
    commit = subprocess.check_output(["git", "-C", wanted.against, "rev-parse", "--short=12", "HEAD"], text=True)
    if wanted.words is None:
        PAGE.write_text(page(measured, commit.strip()))


def compared(case: Case, other: Path, iterations: int) -> tuple[Times, Times]:
    """Return what iterations of this version and of the other one take; those of one number are neighbours in time."""
    model = cloned(Start(reply_tokens=case.words), ROOT / "runs" / "laboratory")
    times = Times(), Times()
    with ExitStack() as stack:
        processes = [stack.enter_context(contender(tree, case, model, iterations)) for tree in (ROOT, other)]
        for number in range(iterations):
            for which in (0, 1) if number % 2 else (1, 0):
                clock, processor = one_iteration(processes[which])
                if number >= FIRST:
                    times[which].clock.append(clock)
                    times[which].processor.append(processor)
    return times


@contextmanager
def contender(tree: Path, case: Case, model: Path, iterations: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that trains with the version in a folder, and waits before each iteration."""
    with tempfile.TemporaryDirectory() as names:
        (Path(names) / "agentrl_envs").symlink_to(tree / "envs")  # its import name
        with subprocess.Popen(
            [
                sys.executable,
                ROOT / "benchmarks" / "laboratory" / "turnstile.py",
                str(case.words),
                str(case.shared),
                model,
                str(iterations),
            ],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{names}:{tree}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            yield process


def one_iteration(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Let a process do one iteration, and return its seconds of the clock and of the processor."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for said in process.stdout:
        if said.startswith("took"):
            clock, processor = map(float, said.split()[1:])
            return clock, processor
    raise SystemExit(f"a process ended with code {process.wait()}: {process.stderr.read()[-2000:]}")


def ratios(mine: list[float], others: list[float]) -> list[float]:
    """Return how many times as fast this version did each iteration."""
    return [other / own for own, other in zip(mine, others, strict=True)]


def row(case: Case, mine: Times, other: Times) -> list[str]:
    """Return a row of the table."""
    clock, processor = ratios(mine.clock, other.clock), ratios(mine.processor, other.processor)
    return [
        case.name,
        f"{TURNS / median(other.clock):,.0f}",
        f"{TURNS / median(mine.clock):,.0f}",
        *(f"{median(x):.2f} ({quantiles(x)[0]:.2f} to {quantiles(x)[2]:.2f})" for x in (clock, processor)),
    ]


def processor() -> str:
    """Return the name of the processor, where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def page(measured: Mapping[Case, tuple[Times, Times]], commit: str) -> str:
    """Return the page."""
    count = len(next(iter(measured.values()))[0].clock)
    rows = [row(case, *times) for case, times in measured.items()]
    return "\n".join(
        [
            "# Turns per second",
            "",
            "Whole iterations with models of 0.02 million parameters, where overhead is all, against an older version",
            f"of this repository (`{commit}`): key and door of [the laboratory](laboratory.md), {ENVS} environments,",
            f"{TURNS} turns and two optimizer steps an iteration, one thread. Both versions are there at the same time",
            "and take iterations by turns.",
            "*Times as fast* is the median of pairs that are neighbours in time, in brackets their quartiles;",
            f"{count} pairs a row, on {processor()}. Other processors give other ratios. Written by",
            "`python -m benchmarks.laboratory.turns_per_second --against ../older`.",
            "",
            "| replies | turns a second before | now | times as fast, by the clock | by time of the processor |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join(cells)} |" for cells in rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
