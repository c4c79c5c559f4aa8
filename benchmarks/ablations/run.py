"""Ablations with the demo model: what is missing is run, then the page is written anew.

    make ablations                                              # all arms, three seeds; over an hour on two cores
    .venv/bin/python benchmarks/ablations/run.py --only no_kl   # one arm
    .venv/bin/python benchmarks/ablations/run.py --report       # the page alone, from the records

Each run adds its record to `docs/results/ablations.json` as it ends, so this can be stopped at any time and goes on
where it stopped, also on another machine. A run is made again when its settings have changed, or when it failed.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.ablations.arms import ARMS, SEEDS  # noqa: E402
from benchmarks.ablations.launch import Running  # noqa: E402
from benchmarks.ablations.records import Job, Record, Records  # noqa: E402
from benchmarks.ablations.report import write_report  # noqa: E402

POLL = 0.5  # seconds


def run_all(jobs: Sequence[Job], records: Records, folder: Path, workers: int) -> int:
    """Run the jobs in this order, so many at a time; the number of those that failed."""
    waiting, running, failed = list(jobs), list[Running](), 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running.append(Running(job, folder / f"{job.arm}-seed{job.seed}"))
                print(f"started {job}, {len(waiting)} waiting", flush=True)
            time.sleep(POLL)
            for run in [run for run in running if run.ended]:
                running.remove(run)
                record = run.record()
                records.add(record)
                run.tidy()
                failed += record["status"] == "failed"
                print(f"{run.job}: {in_words(record)}", flush=True)
                write_report(records)
    finally:
        with ExitStack() as stack:  # only when interrupted; ends each of them whatever happens to the others
            for run in running:
                stack.callback(run.tidy)
                stack.callback(run.stop)
    return failed


def in_words(record: Record) -> str:
    if record["status"] == "failed":
        return "\n  ".join([f"failed, {record['reason']}; it is tried again next time", *record["log"]])
    before, after = (record[when]["success"] for when in ("before", "after"))
    return f"held-out success {before:.2f} -> {after:.2f} in {record['minutes']:.1f} minutes"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two of these at once would run the same things."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"other ablations are running in {folder}") from None
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--report", action="store_true", help="write the page from the records, run nothing")
    parser.add_argument("--records", type=Path, default=ROOT / "docs" / "results" / "ablations.json")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ablations", help="folder of logs and events")
    chosen = parser.parse_args(arguments)
    if chosen.workers < 1:
        parser.error("--workers must be at least 1")
    records, failed = Records(chosen.records), 0
    if not chosen.report:
        with alone(chosen.runs):
            jobs = records.missing(chosen.only, chosen.seeds)
            print(f"{len(jobs)} runs to make, {len(records.current())} are there", flush=True)
            failed = run_all(jobs, records, chosen.runs.resolve(), chosen.workers)
    print(f"written to {write_report(records)}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us ends the runs as well
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
