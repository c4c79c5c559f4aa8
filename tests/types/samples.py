"""Short ways to write segments, turns and samples."""

from __future__ import annotations

from typing import Any

from lightning_agentrl.types import Sample, Segment, SegmentKind, StopReason, Turn
from tests.inputs import text


def prompt(*ids: int) -> Segment:
    return Segment(SegmentKind.PROMPT, text(*ids))


def glue(*ids: int) -> Segment:
    return Segment(SegmentKind.GLUE, text(*ids))


def observation(*ids: int) -> Segment:
    return Segment(SegmentKind.OBSERVATION, text(*ids))


def action(*ids: int) -> Segment:
    """The log-prob of token n is -n / 10, so that it can be told apart."""
    return Segment(SegmentKind.ACTION, text(*ids), tuple(-i / 10 for i in ids))


def turn(**fields: Any) -> Turn:
    defaults: dict[str, Any] = {
        "env": 0,
        "episode": 0,
        "index": 0,
        "observation": "a door",
        "reply": "ACTION: open",
        "thought": "",
        "action": "open",
        "valid": True,
        "env_reward": 0.0,
        "reward": 0.0,
        "episode_return": 0.0,
        "terminated": False,
        "truncated": False,
        "stop": None,
        "success": None,
        "hit_token_cap": False,
        "history_cuts": 0,
        "policy_version": 3,
        "env_seconds": 0.25,
        "engine_seconds": 0.5,
    }
    return Turn(**(defaults | fields))


def windowed() -> list[Sample]:
    """Env 1 plays turns 4 (goes on) and 5 (terminates), then turn 0 of the next episode, cut; env 0 is truncated."""
    end = {"terminated": True, "stop": StopReason.ENV_DONE, "success": True}
    cut = {"truncated": True, "stop": StopReason.ENV_TRUNCATED, "bootstrap": (prompt(1, 2, 90),)}
    return [
        Sample((prompt(1, 2), action(11, 12)), (turn(env=1, episode=3, index=4, reward=-0.1, valid=False),)),
        Sample((prompt(1, 3), action(13)), (turn(env=1, episode=3, index=5, reward=1.0, **end),)),
        Sample((prompt(1, 4), action(14, 15, 16, 17)), (turn(env=1, episode=4, bootstrap=(prompt(1, 91),)),)),
        Sample((prompt(1, 5, 6), action(18, 19)), (turn(env=0, episode=0, index=7, reward=0.5, **cut),)),
    ]


def growing() -> list[Sample]:
    """One episode of three turns in one row, and one of a single turn."""
    turns = (turn(reward=0.5), turn(index=1), turn(index=2, reward=2.0, bootstrap=(prompt(1, 92),)))
    segments = (prompt(1, 2), action(11, 12), glue(7), observation(8, 8), action(13), observation(9), action(14, 15))
    return [Sample(segments, turns), Sample((prompt(1), action(16)), (turn(env=2, episode=1, reward=-1.0),))]
