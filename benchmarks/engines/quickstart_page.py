"""The page of `benchmarks/engines/quickstart.py`, made from its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.intervals import T_QUANTILES, Record, pooled, success_difference, successes
from lightning_agentrl.metrics.episodes import wilson_interval

ENGINES = {"transformers": "configs/quickstart.yaml", "vllm": "configs/quickstart_vllm.yaml"}
NAMES = {"transformers": "`TransformersEngine`", "vllm": "`VLLMEngine`"}
PARTS: dict[str, Callable[[Record], float]] = {  # minutes of a run
    "whole process": lambda record: record["process_minutes"],
    "starting and ending": lambda record: record["process_minutes"] - record["minutes"],
    "held-out episodes, checkpoints": lambda record: record["minutes"] - stage(record, "iteration"),
    "iterations": lambda record: stage(record, "iteration"),
    "of these `collect`": lambda record: stage(record, "collect"),
    "of that the weights (`time/sync_seconds`)": lambda record: stage(record, "sync"),
    "of these `score`": lambda record: stage(record, "score"),
    "of these `update`": lambda record: stage(record, "update"),
    "of these `log`": lambda record: stage(record, "log"),
}
RATIO_OF = ("whole process", "held-out episodes, checkpoints", "iterations", "of these `collect`")


def stage(record: Record, name: str) -> float:
    """Minutes of a stage, summed over the iterations."""
    return sum(iteration.get(name, 0.0) for iteration in record["iterations"]) / 60


def sync_shares(record: Record) -> list[float]:
    """Share of each iteration that went into sending weights; of those in which they were sent."""
    return [times["sync"] / times["iteration"] for times in record["iterations"] if "sync" in times]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean with Student's 95 % interval, each value being one observation; None with fewer than two."""
    if len(values) < 2:
        return None
    mean = statistics.mean(values)
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float] | None:
    """Geometric mean of ratios with the interval of their logarithms' mean; None with fewer than two."""
    of_logs = mean_interval([math.log(ratio) for ratio in ratios])
    return None if of_logs is None else (math.exp(of_logs[0]), math.exp(of_logs[1]), math.exp(of_logs[2]))


def page(records: Sequence[Record], note: str, settings: Sequence[str]) -> str:
    """Markdown.

    Args:
        records: of runs with equal settings.
        note: how they were made.
        settings: what of the configs was changed.
    """
    arms = {engine: [record for record in records if record["engine"] == engine] for engine in ENGINES}
    seeds = sorted({record["seed"] for record in arms["transformers"]} & {record["seed"] for record in arms["vllm"]})
    arms = {engine: [record for record in arms[engine] if record["seed"] in seeds] for engine in ENGINES}
    parts = ["# Quickstart with vLLM", _about(settings)]
    if not seeds:
        return "\n\n".join([*parts, "No seed has been run with both engines yet.", note]).strip() + "\n"
    parts += [_runs(records), _success(arms), _verdict(arms), "## Time", _time(arms), _sync(arms["vllm"])]
    parts += [_machine(records[0]), _how_to_read(), note]
    return "\n\n".join(filter(None, parts)) + "\n"


def _about(settings: Sequence[str]) -> str:
    changed = f"\nChanged in both: `{' '.join(settings)}`." if settings else ""
    return (
        "The quickstart as it is and with `VLLMEngine`, everything else being equal (`configs/quickstart.yaml`,\n"
        "`configs/quickstart_vllm.yaml`). Each run is a process of its own; the two of a seed follow each other, and\n"
        "either engine is the first one by turns. Written by `python -m benchmarks.engines.quickstart` from\n"
        f"`quickstart_engines.json`.{changed}"
    )


def _runs(records: Sequence[Record]) -> str:
    lines = [
        "| seed | engine | success before | success after | mean turns after | minutes | weights, share of the time |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        cells = [str(record["seed"]), NAMES[record["engine"]]]
        cells += [_proportion(*successes(record, when)) for when in ("before", "after")]
        share = stage(record, "sync") / stage(record, "iteration")
        cells += [f"{record['after']['mean_turns']:.2f}", f"{record['process_minutes']:.1f}", f"{100 * share:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _proportion(count: int, of: int) -> str:
    low, high = wilson_interval(count, of)
    return f"{count / of:.3f} ({low:.3f} to {high:.3f})"


def _success(arms: dict[str, list[Record]]) -> str:
    lines = [
        "| engine | before, all episodes | after, all episodes | after, mean of seeds |",
        "|---|---|---|---|",
    ]
    for engine, records in arms.items():
        cells = [NAMES[engine], *(_proportion(*pooled(records, when)) for when in ("before", "after"))]
        over_seeds = _over_seeds(records)
        cells.append("needs two seeds" if over_seeds is None else "{:.3f} ({:.3f} to {:.3f})".format(*over_seeds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _over_seeds(records: Sequence[Record]) -> tuple[float, float, float] | None:
    interval = mean_interval([x / n for x, n in (successes(record, "after") for record in records)])
    return None if interval is None else (interval[0], max(interval[1], 0.0), min(interval[2], 1.0))


def _verdict(arms: dict[str, list[Record]]) -> str:
    difference = success_difference(arms["vllm"], arms["transformers"])
    bounds = [_over_seeds(arms[engine]) for engine in ENGINES]
    if difference is None or bounds[0] is None or bounds[1] is None:
        return ""
    overlap = max(bounds[0][1], bounds[1][1]) <= min(bounds[0][2], bounds[1][2])
    points, low, high = (100 * number for number in difference)
    return (
        f"Success after training with `VLLMEngine` less that with `TransformersEngine`: **{points:+.1f} points**\n"
        f"({low:+.1f} to {high:+.1f}); the intervals over seeds {'overlap' if overlap else '**do not overlap**'}."
    )


def _time(arms: dict[str, list[Record]]) -> str:
    lines = [
        "| minutes, mean over seeds | `TransformersEngine` | `VLLMEngine` | ratio, paired by seed |",
        "|---|---|---|---|",
    ]
    for name, minutes in PARTS.items():
        columns = [[minutes(record) for record in arms[engine]] for engine in ENGINES]
        cells = [name, *(f"{statistics.mean(column):.2f}" for column in columns)]
        cells.append(_ratio(*columns) if name in RATIO_OF else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(base: Sequence[float], other: Sequence[float]) -> str:
    ratios = [after / before for before, after in zip(base, other, strict=True)]
    interval = ratio_interval(ratios)
    if interval is None:
        return f"**{ratios[0]:.2f}**"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return "**{:.2f}** (interval {:.2f} to {:.2f}; seeds ".format(*interval) + f"{spread})"


def _sync(records: Sequence[Record]) -> str:
    shares = [share for record in records for share in sync_shares(record)]
    whole = sum(stage(record, "sync") for record in records) / sum(stage(record, "iteration") for record in records)
    return (
        f"Handing the weights to `VLLMEngine` took **{100 * whole:.2f} %** of the time of the iterations; of a single\n"
        f"iteration in which it happened {100 * statistics.median(shares):.2f} % in the median and "
        f"{100 * max(shares):.2f} % at most."
    )


def _machine(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    machine = record["machine"]
    return f"On {machine['cores']} cores, device `{machine['device']}`, precision {machine['precision']}. {versions}."


def _how_to_read() -> str:
    return (
        "Minutes of a run are those of its whole process, with loading the model, starting the engine and the\n"
        "held-out episodes before and after. A ratio is that of `VLLMEngine` to `TransformersEngine`, geometric mean\n"
        "over seeds with Student's interval of its logarithm; below 1 vLLM is faster. Intervals of one run and of all\n"
        "episodes are Wilson's, those over seeds Student's; that of the difference is the wider one of Welch's over\n"
        "runs and Newcombe's over episodes. The held-out episodes are the same in all runs."
    )
