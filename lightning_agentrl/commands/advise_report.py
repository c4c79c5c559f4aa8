"""What `agentrl advise` says on a terminal: what was measured, then the advice and its reasons."""

from __future__ import annotations

import math

from lightning_agentrl.metrics.advice import Advice
from lightning_agentrl.metrics.facts import Facts, Measured
from lightning_agentrl.view import Entry, Report, Table


def facts_table(facts: Facts, title: str) -> Report:
    """Return the table of what was measured."""
    lines: list[tuple[str, str]] = [
        ("episodes", f"{facts.episodes} in {facts.starts} starts, {facts.turns} turns, {facts.lost} lost"),
        ("tokens of a reply, median and 90 %", _pair(facts.reply_tokens)),
        ("turns of an episode, median and 90 %", _pair(facts.horizon)),
        ("episodes that a limit ended", _share(facts.cut)),
        ("states met in another episode of the start", _share(facts.met_in_others)),
        ("states met again in the episode", _share(facts.met_again)),
        ("mean return", f"{facts.mean_return:.3g}"),
        ("episodes above the least return", _share(facts.above_least)),
        ("starts with returns that differ", _share(facts.mixed)),
        ("variance of returns between and within starts", f"{_number(facts.between)}, {_number(facts.within)}"),
        ("turns with a reward", f"{_share(facts.rewarded)}; unlike the commonest {_share(facts.told_apart)}"),
        ("of these before the last turn", _share(facts.on_the_way)),
        ("replays that came out the same", _share(facts.repeats)),
        ("states and actions with several outcomes", _share(facts.uncertain)),
        ("returns explained by a quick critic", _interval(facts.explained, 1, "")),
    ]
    if facts.unended:
        lines.append(("episodes that did not end", str(facts.unended)))
    rows = [Entry(name, value, brief=True) for name, value in lines]
    return Report(title, [Table("Measured, with 95 % intervals", rows)])


def advice_text(advice: Advice) -> str:
    """Return the advice, its reasons and the notes."""
    lines = [f"Advice: {advice.setting} (how sure: {advice.sure})"]
    width = max(len(one.part) for one in advice.choices)
    for one in advice.choices:
        lines.append(f"  {one.part:<{width}}  {one.value} ({one.sure}): {one.why}")
        if one.source is not None:
            lines.append(f"  {'':<{width}}  see {one.source}")
    lines += [f"  ! {note}" for note in advice.notes]
    return "\n".join(lines)


def _pair(pair: tuple[float, float]) -> str:
    return f"{pair[0]:g}, {pair[1]:g}"


def _number(x: float) -> str:
    return "unknown" if math.isnan(x) else f"{x:.3g}"


def _share(measured: Measured) -> str:
    return _interval(measured, 100, " %")


def _interval(measured: Measured, times: float, unit: str) -> str:
    if math.isnan(measured.value):
        return "not enough episodes, or nothing to tell it"
    shape = ".0f" if unit else ".2f"
    value, low, high = (times * x for x in (measured.value, measured.low, measured.high))
    around = "" if math.isnan(low) else f" ({low:{shape}} to {high:{shape}})"
    return f"{value:{shape}}{unit}{around}"
