"""Rendering of a certificate as lines of text, and as one HTML file without scripts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from lightning_agentrl.tools.check_env.certificate import Certificate
from lightning_agentrl.tools.check_env.texts import shown as on_one_line

_COLUMNS = 110
_SHOWN_ACTIONS = 6


def lines(certificate: Certificate) -> list[str]:
    """Return the lines for the terminal."""
    env = certificate.id + (f" {dict(certificate.kwargs)}" if certificate.kwargs else "")
    shown = [f"{on_one_line(env, 300)}: {'passed' if certificate.passed else 'FAILED'}, {certificate.counts}"]
    for finding in certificate.findings:
        shown += ["", *_finding_lines(finding)]
    shown += ["", *figures(certificate.figures)]
    shown += [f"not checked: {part} ({why})" for part, why in certificate.cut.items()]
    if certificate.train is not None:
        shown.append(f"training: {on_one_line(certificate.train['said'], 300)}")
    parts = ", ".join(
        f"{name} {certificate.seconds[name]:.1f}"
        for name in ("import", "resets", "play")
        if name in certificate.seconds
    )
    shown.append(f"{certificate.seconds.get('total', 0.0):.1f} s ({parts})")
    return shown


def _finding_lines(finding: Mapping[str, Any]) -> list[str]:
    other = f" ({finding['openenv']})" if finding["openenv"] else ""
    times = f", {finding['times']} times" if finding["times"] > 1 else ""
    rows = [f"{finding['severity']}  {finding['check']}{other}: {finding['said']}{times}"]
    if finding["seed"] is not None:
        rows.append(f"  repeat: {evidence(finding)}")
    rows.append(f"  fix:    {finding['mend']}")
    return [line for row in rows for line in textwrap.wrap(row, _COLUMNS, subsequent_indent="          ")]


def evidence(finding: Mapping[str, Any]) -> str:
    """Return the calls that reproduce a finding, with only the last of many actions (the JSON file has all)."""
    actions = finding["actions"]
    calls = [f"step({action})" for action in actions[-_SHOWN_ACTIONS:]]
    if len(actions) > _SHOWN_ACTIONS:
        calls.insert(0, f"... {len(actions) - _SHOWN_ACTIONS} more")
    return "; ".join([f"reset(seed={finding['seed']})", *calls])


def figures(measured: Mapping[str, Any]) -> list[str]:
    found = []
    if "turns" in measured:
        returns, turns = measured["random_return"], measured["turns"]
        won = f", success {measured['random_success']:.2f}" if "random_success" in measured else ""
        found.append(
            f"random play: return {returns['mean']:.3g} ({returns['least']:.3g} to {returns['most']:.3g}){won}, "
            f"{turns['mean']:.1f} turns (longest {turns['longest']}), {measured['episodes']} episodes"
        )
        text = measured["text_characters"]
        found.append(
            f"texts: {text['median']:.0f} characters (longest {text['longest']}), {measured['actions']} actions"
        )
    if "solver" in measured:
        solver = measured["solver"]
        found.append(f"scripted player: {solver['won']} of {solver['levels']} levels, {solver['turns']:.1f} turns")
    if "memory_needed" in measured:
        pairs = measured["memory_needed"]
        found.append(
            f"memory: {pairs['share']:.0%} of {pairs['pairs']} repeated pairs of text and action have several outcomes"
        )
    for name in ("step", "reset"):
        if times := measured.get(f"{name}_seconds"):
            tail = f", p99 {times['p99'] * 1000:.3g}" if "p99" in times else ""
            found.append(f"{name}: median {times['median'] * 1000:.3g} ms{tail}, longest {times['longest'] * 1000:.3g}")
    return found


_WIDTH, _HEIGHT, _EDGE = 640, 240, 44  # size and margin of the plot in pixels
_TRAINED, _RANDOM = "#1f8a70", "#8a8f98"


def page(certificate: Certificate) -> str:
    seconds = certificate.seconds.get("total", 0)
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_text(certificate.id),
        about=_text(f"{_json(certificate.kwargs)}, agentrl check-env {certificate.version}, {seconds:.1f} s"),
        verdict="passed" if certificate.passed else "error",
        counts=_text(f"{'Passed' if certificate.passed else 'Failed'}: {certificate.counts}"),
        body="\n".join(_body(certificate)),
    )


def _body(certificate: Certificate) -> Iterable[str]:
    yield from (_finding(finding) for finding in certificate.findings)
    if certificate.train is not None:
        yield f"<h2>Training of a small policy</h2><p>{_text(certificate.train['said'])}</p>"
        if certificate.train["curves"]:
            yield _curve(certificate.train)
    measured = "".join(_row(line.partition(": ")[::2]) for line in figures(certificate.figures))
    yield f"<h2>Figures</h2><table>{measured}</table>"
    if earned := certificate.figures.get("earned"):
        rows = [(one["policy"], f"{one['return']:.3g}", f"{one['episodes']} episodes") for one in earned]
        yield f"<h2>What replies earn</h2><table>{''.join(map(_row, rows))}</table>"
    if certificate.cut:
        yield f"<h2>Not checked</h2><table>{''.join(map(_row, certificate.cut.items()))}</table>"


def _finding(finding: Mapping[str, Any]) -> str:
    other = f" ({finding['openenv']})" if finding["openenv"] else ""
    times = f", seen {finding['times']} times" if finding["times"] > 1 else ""
    parts = [f"<h3>{_text(finding['severity'])}: {_text(finding['check'] + other)}</h3>"]
    parts.append(f"<p>{_text(finding['said'] + times)}</p>")
    if finding["seed"] is not None:
        calls = [f"env.reset(seed={finding['seed']})", *(f"env.step({action})" for action in finding["actions"])]
        shown = f"<pre>{_text(chr(10).join(calls))}</pre>"
        few = len(calls) <= 6
        parts.append(shown if few else f"<details><summary>{len(calls)} calls repeat it</summary>{shown}</details>")
    parts.append(f'<p class="quiet">Fix: {_text(finding["mend"])}</p>')
    return f'<section class="finding {_text(finding["severity"])}">{"".join(parts)}</section>'


def _curve(train: Mapping[str, Any]) -> str:
    """Return an SVG with the curves of all seeds, the interval of their mean, and the interval of random replies."""
    curves: Sequence[Sequence[float]] = train["curves"]
    points: Sequence[Mapping[str, float]] = train["points"]
    random = train["random"]
    values = [value for curve in curves for value in curve] + [random["low"], random["high"]]
    bottom, top = min(values), max(max(values), min(values) + 1e-9)
    last = len(curves[0])

    def at(iteration: float, value: float) -> str:
        x = _EDGE + (_WIDTH - 2 * _EDGE) * (iteration - 1) / max(last - 1, 1)
        y = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (min(max(value, bottom), top) - bottom) / (top - bottom)
        return f"{x:.1f},{y:.1f}"

    def band(of: Sequence[Mapping[str, float]], colour: str) -> str:
        edge = [at(one["iteration"], one["high"]) for one in of]
        edge += [at(one["iteration"], one["low"]) for one in reversed(of)]
        return f'<polygon fill="{colour}" opacity="0.25" points="{" ".join(edge)}"/>'

    def line(of: Iterable[tuple[float, float]], width: int, opacity: float) -> str:
        places = " ".join(at(*one) for one in of)
        style = f'fill="none" stroke="{_TRAINED}" stroke-width="{width}" opacity="{opacity}"'
        return f'<polyline {style} points="{places}"/>'

    parts = [band([{**random, "iteration": 1}, {**random, "iteration": last}], _RANDOM), band(points, _TRAINED)]
    parts += [line(enumerate(curve, start=1), 1, 0.5) for curve in curves]
    parts.append(line(((one["iteration"], one["mean"]) for one in points), 3, 1.0))
    parts += [f'<text x="4" y="{y}">{value:.3g}</text>' for value, y in ((top, _EDGE), (bottom, _HEIGHT - _EDGE))]
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 10}">iteration 1 to {last}</text>')
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="return by iteration">'
    said = "Green: three seeds, their mean and its 95 % interval. Gray: random replies."
    return f'{head}{"".join(parts)}</svg><p class="quiet">{said}</p>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _text(text: str) -> str:
    return escape(text.encode("utf-8", "backslashreplace").decode())
