"""What the checks have found so far: of each check the first evidence and how often it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_agentrl.tools.check_env.rules import RULES, Severity
from lightning_agentrl.tools.check_env.texts import expression, shown


@dataclass
class Finding:
    """What one check found.

    Args:
        check: its name in `RULES`.
        said: one sentence with the numbers.
        severity: of the rule, unless the environment declares it.
        seed: of the episode in which it shows; None where no episode is needed.
        actions: what to send after the reset, as Python expressions.
        times: how often it was seen.
    """

    check: str
    said: str
    severity: Severity
    seed: int | None = None
    actions: list[str] = field(default_factory=list)
    times: int = 1

    def plain(self) -> dict[str, Any]:
        """Return it with what its rule says, for JSON."""
        rule = RULES[self.check]
        return {**asdict(self), "mend": rule.mend, "openenv": rule.openenv}


class Log:
    """Findings, figures, and what was not looked at."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.figures: dict[str, Any] = {}
        self.cut: dict[str, str] = {}
        """Check -> why it was not made, or not whole."""
        self.milder: dict[str, Severity] = {}
        """Check -> severity in place of its rule's, since the environment declares that it is so."""

    def add(self, check: str, said: str, seed: int | None = None, actions: Sequence[str] = ()) -> None:
        """Note what a check found; only its first evidence is kept."""
        if check in self.findings:
            self.findings[check].times += 1
            return
        severity = self.milder.get(check, RULES[check].severity)
        self.findings[check] = Finding(check, shown(said, 600), severity, seed, [expression(one) for one in actions])

    def __contains__(self, check: str) -> bool:
        return check in self.findings
