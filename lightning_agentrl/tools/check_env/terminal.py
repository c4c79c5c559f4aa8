"""A certificate as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from lightning_agentrl.tools.check_env.certificate import Certificate
from lightning_agentrl.tools.check_env.texts import shown as on_one_line

_WIDTH = 110
_SHOWN_ACTIONS = 6


def lines(certificate: Certificate) -> list[str]:
    """Return the lines that the terminal shows."""
    env = certificate.id + (f" {dict(certificate.kwargs)}" if certificate.kwargs else "")
    shown = [f"{on_one_line(env, 300)}: {'passed' if certificate.passed else 'FAILED'}, {certificate.counts}"]
    for finding in certificate.findings:
        shown += ["", *_finding(finding)]
    shown += ["", *figures(certificate.figures)]
    shown += [f"not looked at: {part} ({why})" for part, why in certificate.cut.items()]
    if certificate.train is not None:
        shown.append(f"training: {on_one_line(certificate.train['said'], 300)}")
    parts = ", ".join(
        f"{name} {certificate.seconds[name]:.1f}"
        for name in ("import", "resets", "play")
        if name in certificate.seconds
    )
    shown.append(f"{certificate.seconds.get('total', 0.0):.1f} s ({parts})")
    return shown


def _finding(finding: Mapping[str, Any]) -> list[str]:
    other = f" ({finding['openenv']})" if finding["openenv"] else ""
    times = f", {finding['times']} times" if finding["times"] > 1 else ""
    rows = [f"{finding['severity']}  {finding['check']}{other}: {finding['said']}{times}"]
    if finding["seed"] is not None:
        rows.append(f"  see it: {evidence(finding)}")
    rows.append(f"  mend:   {finding['mend']}")
    return [line for row in rows for line in textwrap.wrap(row, _WIDTH, subsequent_indent="          ")]


def evidence(finding: Mapping[str, Any]) -> str:
    """Return what to call to see a finding again; of many actions the last ones, the JSON file has all."""
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
            f"memory: {pairs['share']:.0%} of {pairs['pairs']} repeated pairs of text and action differ in what follows"
        )
    for name in ("step", "reset"):
        if times := measured.get(f"{name}_seconds"):
            tail = f", p99 {times['p99'] * 1000:.3g}" if "p99" in times else ""
            found.append(f"{name}: median {times['median'] * 1000:.3g} ms{tail}, longest {times['longest'] * 1000:.3g}")
    return found
