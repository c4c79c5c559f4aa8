"""The page of the ablations, made from the records. What was written by hand between the two marks is kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.ablations.arms import BASE_CONFIG, COMPARISONS, Comparison
from benchmarks.ablations.picture import draw
from benchmarks.ablations.records import Job, Record, Records
from benchmarks.ablations.summary import (
    Interval,
    Pair,
    area,
    area_difference,
    complete,
    last,
    pairs_of,
    share,
    success_difference,
    successes,
)

NOTES = ("<!-- notes: kept when this page is written anew -->", "<!-- end of notes -->")
NO_NOTES = "None yet."

HOW_TO_READ = """\
## How to read this

* Base and arm differ in the one choice of their line. Differences are arm less base, over the seeds that both have.
* A run is one observation: the interval of a difference is Welch's over the runs (Student's t, degrees of freedom
  rounded down). That of held-out success is never narrower than Newcombe's over the pooled episodes, which takes them
  as independent. So it holds the spread of seeds as far as so few of them show it, and it is wide.
* An interval that holds 0 does not say that a choice makes no difference, only that these runs do not show one. One
  that does not hold 0 is a hint: of six such intervals, about one set in four has one by chance alone.
* All runs are judged on the same held-out levels, with sampled actions. Whether other levels would say the same is not
  in the interval.
* The area is the mean height of the curve of reward per turn over all iterations, the warm-up's included. It counts
  every turn, where success counts the episodes that have ended, which are short ones at first.
* This is one small model on one easy level with replies of one word, for a few iterations. Long episodes, thoughts and
  hundreds of iterations, for which the recipe was made, are not tried here."""


def write_report(records: Records) -> Path:
    """Write page and picture beside the records."""
    path = records.path.with_suffix(".md")
    picture = path.with_suffix(".png")
    current = records.current()
    pairs = pairs_of(current)
    drawn = any(both.base for both in pairs.values())
    if drawn:
        draw(pairs, picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    notes = _notes(path.read_text()) if path.exists() else NO_NOTES
    path.write_text(page(current, records.current("failed"), pairs, picture.name if drawn else None, notes))
    return path


def page(
    current: Mapping[Job, Record],
    failed: Mapping[Job, Record],
    pairs: Mapping[str, Pair],
    picture: str | None,
    notes: str,
) -> str:
    there, wanted = complete(current)
    parts = ["# Ablations", _about()]
    if there < wanted:
        parts.append(f"**{there} of {wanted} runs are there;** `make ablations` makes the others.")
    parts += [_failures(failed), "## What happened", _table(pairs), _reach(pairs)]
    if picture:
        parts.append(f"![curves of every comparison]({picture})")
        parts.append(
            "Thin lines are seeds, thick ones their means. The marks at both ends are held-out success before and "
            "after: large\nones over all seeds, small ones of each."
        )
    parts += ["## Notes by hand", f"{NOTES[0]}\n{notes}\n{NOTES[1]}", HOW_TO_READ]
    parts += ["## What was changed and why", *map(_section, COMPARISONS), "## Every run", _runs(current)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _notes(text: str) -> str:
    start, end = (text.find(mark) for mark in NOTES)
    return NO_NOTES if min(start, end) < 0 else text[start + len(NOTES[0]) : end].strip()


def _about() -> str:
    config = yaml.safe_load(BASE_CONFIG.read_text())
    data, env = config["data"]["init_args"], config["data"]["init_args"]["env"]
    return (
        f"Choices of the recipe, each taken back alone. Model `{config['model']['init_args']['model']}`, environment "
        f"`{env['id']}` with\n`{env['kwargs']}`, {config['trainer']['max_epochs']} iterations of "
        f"{data['num_envs'] * data['turns_per_env']} turns in every arm, the warm-up's included, and\n"
        f"{data['validation']['episodes']} held-out episodes before and after. Written by `make ablations` from "
        "`docs/results/ablations.json`;\nthe base run is `benchmarks/ablations/base.yaml`."
    )


def _failures(failed: Mapping[Job, Record]) -> str:
    if not failed:
        return ""
    lines = [f"* {job}: {record['reason']}" for job, record in failed.items()]
    return "\n".join(["Failed, and tried again by the next `make ablations`:", "", *lines])


def _points(interval: Interval | None) -> str:
    if interval is None:
        return "needs two seeds"
    difference, low, high = (100 * x for x in interval)
    return f"{difference:+.1f} ({low:+.1f} to {high:+.1f})"


def verdict(expected: str, interval: Interval | None) -> str:
    """What the interval says, and whether that was expected."""
    if interval is None:
        return "not known yet"
    _, low, high = interval
    if low <= 0 <= high:
        return "no difference shown"
    found = "higher" if low > 0 else "lower"
    return f"{found}, {'as' if found == expected else 'against what was'} expected"


def _before_after(records: Sequence[Record]) -> str:
    return f"{share(records, 'before'):.3f} → {share(records, 'after'):.3f}"


def _mean_area(records: Sequence[Record]) -> str:
    return f"{statistics.mean(map(area, records)):.4f}"


def _table(pairs: Mapping[str, Pair]) -> str:
    lines = [
        "| base against arm | seeds | base: held-out success before → after | arm: the same | difference after, in "
        "points (95 % interval) | area under reward per turn, base | arm | difference (95 % interval) | expected of "
        "the arm's success | what happened to it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for comparison in COMPARISONS:
        both = pairs[comparison.arm]
        cells = [comparison.title, str(len(both.seeds))]
        if both.seeds:
            difference, areas = success_difference(both), area_difference(both)
            cells += [_before_after(both.base), _before_after(both.arm), _points(difference)]
            cells += [_mean_area(both.base), _mean_area(both.arm)]
            cells.append("needs two seeds" if areas is None else "{:+.4f} ({:+.4f} to {:+.4f})".format(*areas))
            cells += [comparison.expected, verdict(comparison.expected, difference)]
        else:
            cells += [""] * 6 + [comparison.expected, verdict(comparison.expected, None)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _reach(pairs: Mapping[str, Pair]) -> str:
    """How small a difference such runs could show."""
    found = [interval for both in pairs.values() if both.seeds and (interval := success_difference(both))]
    if not found:
        return ""
    halves = [50 * (high - low) for _, low, high in found]
    return (
        f"The intervals reach {min(halves):.0f} to {max(halves):.0f} points to each side: a smaller effect on held-out "
        "success could not be seen\nwith so few runs, whether it is there or not."
    )


def _section(comparison: Comparison) -> str:
    changes = "".join(f"\n* `{key}: {_value(value)}`" for key, value in comparison.overrides.items())
    return (
        f"### {comparison.title}\n\nBase: {comparison.base_is}. Arm (`{comparison.arm}`): {comparison.arm_is}.\n"
        f"{changes}\n\n{comparison.why} Expected of the arm: {comparison.expected} success."
    )


def _value(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]  # behind a plain value there is a line of dots


def _runs(current: Mapping[Job, Record]) -> str:
    """Every run, by arm and seed, and what all of them ran with."""
    runs = [current[job] for job in sorted(current, key=lambda job: (job.place, job.seed))]
    if not runs:
        return "None yet."
    lines = [
        "| arm | seed | success before | after | turns before | after | valid before | after | explained variance at "
        "the end | KL at the end | minutes | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in runs:
        cells = [record["arm"], str(record["seed"])]
        for when in ("before", "after"):
            x, n = successes(record, when)
            cells.append(f"{x}/{n} = {x / n:.3f}")
        cells += [f"{record[when]['mean_turns']:.2f}" for when in ("before", "after")]
        cells += [f"{record[when]['valid_action_ratio']:.3f}" for when in ("before", "after")]
        for name, form in (("critic/explained_variance", ".2f"), ("kl/reference", ".4f")):
            value = last(record, name)
            cells.append("" if value is None else format(value, form))
        cells += [f"{record['minutes']:.1f}", f"`{record['commit']}`" if record["commit"] else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _versions(runs)])


def _versions(runs: Sequence[Record]) -> str:
    """One line for each set of versions that occurs."""
    main = ("python", "torch", "lightning", "transformers")
    sets = {json.dumps([{k: r["versions"].get(k) for k in main}, r["machine"]["device"]]): r for r in runs}
    lines = []
    for record in sets.values():
        names = ", ".join(f"{name} {record['versions'].get(name, '?')}" for name in main)
        lines.append(f"{names}, on {record['machine']['device']} in {record['machine']['precision']}.")
    return "\n".join(["One thread a run.", *lines])
