"""How episodes fail, and the numbers of a look at some of them, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_agentrl.metrics.invalid_replies import Invalid
from lightning_agentrl.tools.inspect import Average, Failure, SeenEpisode, SeenTurn, Spread, cycle, failure, look_at
from lightning_agentrl.types import StopReason, Turn
from tests.types.samples import turn


def episode(steps: str, stop: StopReason, **last: object) -> list[Turn]:
    """Turns with observations and actions as given, two letters each."""
    pairs = [steps[i : i + 2] for i in range(0, len(steps), 2)]
    turns = [turn(index=i, observation=pair[0], action=pair[1]) for i, pair in enumerate(pairs)]
    ended = {"terminated": True} if stop is StopReason.ENV_DONE else {"truncated": True}
    end = {"index": len(pairs) - 1, "observation": pairs[-1][0], "action": pairs[-1][1], "stop": stop}
    return [*turns[:-1], turn(**{**end, **ended, **last})]


@pytest.mark.parametrize(
    ("steps", "period"),
    [
        ("", 0),
        ("aaa", 1),
        ("aa", 0),
        ("baaa", 1),
        ("aaab", 0),
        ("ababab", 2),
        ("xabab", 0),
        ("abcabcabc", 3),
        ("abcd" * 3, 4),
        ("abcde" * 3, 0),
    ],
)
def test_a_cycle_is_one_if_the_last_steps_went_through_it_three_times(steps: str, period: int) -> None:
    assert cycle(steps) == period


@pytest.mark.parametrize(
    ("turns", "lost", "how"),
    [
        ([], True, Failure.FAULT),
        (episode("al", StopReason.ENV_FAULT), False, Failure.FAULT),
        (episode("albrcl", StopReason.ENV_TRUNCATED), True, Failure.FAULT),
        (episode("albr", StopReason.ENV_DONE, success=True), False, None),
        (episode("albr", StopReason.ENV_DONE, success=False), False, Failure.DEATH),
        (episode("albrcl", StopReason.ENV_TRUNCATED), False, Failure.TIME_LIMIT),
        (episode("blalalal", StopReason.MAX_TURNS), False, Failure.STUCK),
        (episode("al" * 2 + "bl" * 2, StopReason.MAX_TURNS), False, Failure.TIME_LIMIT),
        (episode("albr" * 3, StopReason.ENV_TRUNCATED), False, Failure.LOOP),
        (episode("albr" * 3, StopReason.INVALID_ACTION), False, Failure.INVALID),
        (episode("al", StopReason.CONTEXT_LENGTH), False, Failure.CONTEXT),
        (episode("al", StopReason.REPLY_BUDGET), False, Failure.BUDGET),
    ],
)
def test_how_an_episode_failed(turns: list[Turn], lost: bool, how: Failure | None) -> None:
    assert failure(turns, lost) is how


def test_replies_that_are_asked_for_again_are_no_steps_of_a_cycle() -> None:
    played = episode("al" * 3, StopReason.MAX_TURNS)
    asked = [replace(one, action="", asked_again=True, truncated=False, stop=None) for one in played]
    turns = [each for pair in zip(asked, played, strict=True) for each in pair]
    assert failure(turns, lost=False) is Failure.STUCK


def test_spread_and_average() -> None:
    assert Spread.of([]) is None
    assert Spread.of([7]) == Spread(7, 7, 7, 7)
    assert Spread.of(range(20, 0, -1)) == Spread(1, 10.5, 19, 20)
    assert Average.of([]) is None
    assert Average.of([1.0, 3.0]) == Average(2.0, 1.0)
    alone = Average.of([2.0])
    assert alone is not None
    assert math.isnan(alone.error)
    rounded = Average.of([0.1 + 0.2, 0.3])
    assert rounded is not None
    assert rounded.error == 0  # `agentrl inspect` warns where all returns are equal
    far = Average.of([1.0, math.inf])
    assert far is not None
    assert (far.mean, math.isnan(far.error)) == (math.inf, True)
    assert str(Average.of([math.inf, -math.inf, math.nan])) == str(Average(math.nan, math.nan))


def test_a_look_by_hand() -> None:
    won = [
        turn(index=0, observation="a", action="left", valid=False, parsed_action=None, history_cuts=2),
        turn(index=1, observation="a", action="left", asked_again=False, thought="a wall", thought_tokens=3),
        turn(
            index=2,
            observation="b",
            action="right",
            terminated=True,
            stop=StopReason.ENV_DONE,
            success=True,
            metrics={"coins": 3.0, "keys": math.nan},
        ),
    ]
    stuck = episode(
        "al" * 4,
        StopReason.MAX_TURNS,
        episode_return=-1.0,
        success=False,
        hit_token_cap=True,
        metrics={"coins": 1.0, "depth": 2.0},
    )
    looked = look_at(
        [
            SeenEpisode(
                tuple(SeenTurn(each, "a prompt", "jump", 10 * (each.index + 1), 2) for each in won), {"l": "l"}
            ),
            SeenEpisode(tuple(SeenTurn(each, "a prompt", "l", 10, 2) for each in stuck), {"l": "l"}),
            SeenEpisode((), {}, lost=True),
        ]
    )
    assert (looked.episodes, looked.turns, looked.successes) == (3, 7, 1)
    assert looked.failures == {Failure.STUCK: 1, Failure.FAULT: 1}
    assert looked.lengths == Spread(3, 3.5, 4, 4)
    assert (looked.valid, looked.invalid.kinds) == (6, {Invalid.INVENTED: 1})
    assert looked.actions == {"l": 4, "left": 2, "right": 1}
    assert (looked.no_ops, looked.followed) == ({"l": 3, "left": 1}, 5)
    assert looked.thoughts is not None
    assert (looked.thoughts.count, looked.thoughts.missing, looked.thought_tokens) == (1, 6, Spread(3, 3, 3, 3))
    assert (looked.prompt_tokens, looked.capped, looked.cut) == (Spread(10, 10, 30, 30), 1, 1)
    assert looked.returns == Average(-0.5, 0.5)
    assert looked.reported.keys() == {"coins", "depth"}
    assert looked.reported["coins"] == Average(2.0, 1.0)
    assert looked.reported["depth"].mean == 2.0  # of the one episode that tells it


def test_a_turn_that_was_asked_again_is_no_action() -> None:
    asked = turn(index=0, action="", valid=False, parsed_action=None, asked_again=True)
    end = turn(index=1, action="left", truncated=True, stop=StopReason.MAX_TURNS)
    looked = look_at([SeenEpisode(tuple(SeenTurn(each, "", "", 1, 1) for each in (asked, end)), {})])
    assert (looked.actions, looked.no_ops, looked.followed, looked.turns) == ({"left": 1}, {}, 0, 2)


def test_a_look_at_nothing_has_no_numbers() -> None:
    looked = look_at([])
    assert math.isnan(looked.valid_ratio)
    assert (looked.interval, looked.returns, looked.lengths, looked.thoughts) == ((0.0, 1.0), None, None, None)
