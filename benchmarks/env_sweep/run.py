"""Run `agentrl check-env` on every environment of `env_sweep.suites` that is not done yet, and print tables.

    python benchmarks/env_sweep/run.py runs/env_sweep                           # everything, one after the other
    python benchmarks/env_sweep/run.py runs/env_sweep --suite ours --minutes 9  # starts none after nine minutes
    python benchmarks/env_sweep/run.py runs/env_sweep --part 1 2                # the second half, for two at a time
    python benchmarks/env_sweep/run.py runs/env_sweep --minutes 0               # only the tables

Each certificate is kept in the folder as a file of JSON with its CPU seconds. One that is removed is made again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder, whose modules are those of a package

from env_defects.run import cell, check  # noqa: E402

from env_sweep.suites import Case, suites  # noqa: E402

OPTIONS = ("--seconds", "20", "--cap", "100")


def make(path: Path, case: Case) -> None:
    """Check one environment and keep the answer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = check(*case, *OPTIONS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer, indent=1))
    part.replace(path)


def loud(answer: dict[str, Any], *severities: str) -> list[dict[str, Any]]:
    """Return the findings of some severities; none where there is no report."""
    return [one for one in (answer["report"] or {}).get("findings", []) if one["severity"] in severities]


def row(name: str, answer: dict[str, Any]) -> str:
    report = answer["report"]
    if report is None:
        return f"| {name} | no report | {cell(answer['told'].strip())} | | | {answer['cpu_seconds']:.1f} | |"
    found = loud(answer, "error", "warning")
    verdict = "errors" if report["errors"] else "warnings" if report["warnings"] else "sound"
    rules = ", ".join(f"{one['check']} ({one['severity'][0]})" for one in found)
    notices = ", ".join(one["check"] for one in loud(answer, "notice"))
    seconds = report["seconds"]
    cut = ", ".join(report["cut"])
    return f"| {name} | {verdict} | {rules} | {notices} | {seconds['play']:.1f} | {answer['cpu_seconds']:.1f} | {cut} |"


def summary(suite: str, cases: int, answers: dict[str, dict[str, Any]]) -> str:
    """Return the line of a suite in the table of all of them."""
    known = [answer for answer in answers.values() if answer["report"] is not None]
    sound = sum(not loud(answer, "error", "warning") for answer in known)
    errors = sum(bool(loud(answer, "error")) for answer in known)
    play = [answer["report"]["seconds"]["play"] for answer in known]
    cpu = [answer["cpu_seconds"] for answer in known]
    counts = (
        f"{len(answers)} of {cases} | {sound} | {len(known) - sound - errors} | {errors} | {len(answers) - len(known)}"
    )
    return (
        f"| {suite} | {counts} | {statistics.median(play):.1f} | {max(play):.1f} | {statistics.median(cpu):.1f} | "
        f"{max(cpu):.1f} |"
    )


def table(answers: dict[str, dict[str, Any]]) -> str:
    """Return a line for each environment of a suite, below the counts of each rule."""
    rules = Counter(
        f"`{one['check']}` ({one['severity']})" for a in answers.values() for one in loud(a, "error", "warning")
    )
    return "\n".join(
        [
            f"By rule: {', '.join(f'{rule} {count}' for rule, count in rules.most_common()) or 'nothing'}.",
            "",
            "| environment | verdict | errors (e) and warnings (w) | notices | seconds | CPU | cut |",
            "|---|---|---|---|---|---|---|",
            *(row(name, answer) for name, answer in answers.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where certificates are kept")
    parser.add_argument("--suite", help="only this one")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no other one is begun")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="number of this part, from 0, and of parts")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    chosen = {suite: cases for suite, cases in suites().items() if given.suite in (None, suite)}
    paths = {
        (suite, name): given.folder / suite.replace(" ", "_") / f"{name}.json"
        for suite, cases in chosen.items()
        for name in cases
    }
    for number, ((suite, name), path) in enumerate(paths.items()):
        if number % given.part[1] != given.part[0] or path.is_file():
            continue
        if time.monotonic() >= end:
            break
        print(f"{number + 1} of {len(paths)}: {name}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, chosen[suite][name])
    done = {
        suite: {name: json.loads(paths[suite, name].read_text()) for name in cases if paths[suite, name].is_file()}
        for suite, cases in chosen.items()
    }
    print("| suite | checked | sound | warnings | errors | no report | seconds: median | most | CPU: median | most |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for suite, answers in done.items():
        print(summary(suite, len(chosen[suite]), answers) if answers else f"| {suite} | none | | | | | | | | |")
    for suite, answers in done.items():
        print(f"\n### {suite}\n\n{table(answers)}")


if __name__ == "__main__":
    main()
