"""The page of a report, made of what was kept of its parts."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_report.parts import Machine, Parts
from benchmarks.gpu_report.runner import Outcome, Part

HEAD = """\
# {title}

Written by `make gpu-report`, which ends each part at its limit and goes on where it stopped. {machine}

{versions}
"""
ON_GPUS = "What GPUs do"
ON_A_CPU = "A trial of the GPU report"
NO_GPU = (
    "This machine has no GPU: every part ran with a tiny random model on the CPU, to try the part. **None of these "
    "figures say anything about a GPU.**"
)
NONE_YET = "No GPU has been measured yet: below is what the command will measure."
SIGNS = {"done": "", "failed": "**failed**: ", "late": "**too late**: ", "cannot": "did not run: "}


def page(machine: Machine, versions: Mapping[str, str], parts: Parts, outcomes: Mapping[str, Outcome]) -> str:
    """Write the page.

    Args:
        machine: the parts are for it.
        versions: of packages, by their names.
        parts: under their headings.
        outcomes: by the names of parts; those that have not run have none.
    """
    if machine.gpus:
        title, measured_on = ON_GPUS, f"{named(machine.gpus)}." if outcomes else NONE_YET
    else:
        title, measured_on = ON_A_CPU, NO_GPU
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [HEAD.format(title=title, machine=measured_on, versions=f"{packages}." if outcomes else "").rstrip()]
    for heading, of_heading in parts:
        lines += ["", f"## {heading}", "", "| part | figures | minutes | measured |", "|---|---|---|---|"]
        lines += [row(part, outcomes.get(part.name)) for part in of_heading]
    took = sum(outcome.seconds for outcome in outcomes.values()) / 60
    if outcomes:
        lines += ["", f"All parts together took {took:.1f} minutes."]
    return "\n".join(lines) + "\n"


def named(gpus: tuple[str, ...]) -> str:
    """One name for equal ones."""
    return ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))


def row(part: Part, outcome: Outcome | None) -> str:
    if outcome is None:
        cells = [part.title, "not run yet", f"at most {part.minutes:g}", ""]
    else:
        figures = SIGNS[outcome.ended] + outcome.told.replace("|", "\\|").replace("<", "&lt;")
        cells = [part.title, figures, f"{outcome.seconds / 60:.1f}", f"{outcome.when[:16]}, {outcome.commit}"]
    return f"| {' | '.join(cells)} |"
