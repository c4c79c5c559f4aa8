"""What is made of episodes that were played, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_agentrl.tools.check_env.findings import RULES, Log
from lightning_agentrl.tools.check_env.played import check_memory_needed, check_repeated
from lightning_agentrl.tools.check_env.seen import Play, Seen


def play(states: str, rewards: str, text: str = "") -> Play:
    """An episode of one action, with a letter for each state and + where the step to it is paid."""
    contract: Any = cast(Any, SimpleNamespace(system_prompt=""))
    seen = [Seen(text, contract, {}, float(paid == "+"), state=s) for s, paid in zip(states, rewards, strict=True)]
    return Play(7, "random", ["push"] * (len(seen) - 1), seen)


@pytest.mark.parametrize(
    ("states", "rewards", "found"),
    [
        ("abababab", " + + + +", True),  # the same move, paid four times
        ("abcdefgh", " + + + +", False),  # states that differ in their images alone: their texts are empty
        ("abababab", " +      ", False),
    ],
)
def test_a_move_is_repeated_if_what_is_seen_before_and_after_is(states: str, rewards: str, found: bool) -> None:
    log = Log()
    check_repeated(log, [play(states, rewards)])
    assert ("reward.repeated" in log) is found


def test_moves_that_end_differently_may_need_memory_or_be_chance() -> None:
    log = Log()
    check_memory_needed(log, [play("ab", "  "), play("ac", "  ")])
    finding = log.findings["memory.needed"]
    assert "chance" in finding.said
    assert "random" in RULES["memory.needed"].mend
