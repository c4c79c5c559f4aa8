"""What a segment, a turn and a sample refuse, and what they know of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_agentrl.types import Sample, Segment, SegmentKind, StopReason, input_of
from tests.inputs import text
from tests.types.samples import action, glue, observation, prompt, turn

END = {"terminated": True, "stop": StopReason.ENV_DONE}


@pytest.mark.parametrize("kind", list(SegmentKind))
def test_a_segment_needs_ids(kind):
    with pytest.raises(ValueError, match=f"'{kind}'"):
        Segment(kind, text())


@pytest.mark.parametrize("logps", [(), (-1.0,), (-1.0, -1.0, -1.0)])
def test_an_action_has_one_logp_per_id(logps):
    with pytest.raises(ValueError, match=f"2 ids needs as many log-probs, got {len(logps)}"):
        Segment(SegmentKind.ACTION, text(4, 5), logps)


def test_ids_in_order():
    assert input_of([prompt(1, 2), action(3), glue(4)]) == text(1, 2, 3, 4)
    assert input_of([]) == text()


def test_terminated_turns_have_no_bootstrap():
    with pytest.raises(ValueError, match="terminated turn has no next state"):
        turn(**END, bootstrap=(prompt(1),))
    assert turn(truncated=True, stop=StopReason.MAX_TURNS, bootstrap=(prompt(1),)).done


def test_done_is_either_end():
    assert [turn().done, turn(**END).done, turn(truncated=True, stop=StopReason.MAX_TURNS).done] == [False, True, True]


def test_sample_knows_its_actions():
    first, second = action(4, 5), action(9)
    sample = Sample((prompt(1, 2, 3), first, glue(6), observation(7, 8), second), (turn(), turn(index=1)))
    assert sample.ids == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert sample.action_positions == (3, 4, 8)
    assert sample.actions == [first, second]
    assert [*sample.placed_turns()] == [
        (sample.turns[0], (prompt(1, 2, 3),), first, 3, slice(0, 2)),
        (sample.turns[1], (glue(6), observation(7, 8)), second, 8, slice(2, 3)),
    ]
    assert (sample.row.ids, sample.row.logit_positions) == (sample.ids, (2, 3, 7))  # before each of them


@pytest.mark.parametrize(
    ("segments", "turns", "message"),
    [
        ((prompt(1), action(2)), (), "one action segment per turn, got 1 for 0 turns"),
        ((), (), "one action segment per turn, got 0 for 0 turns"),
        ((prompt(1), action(2)), (turn(), turn(index=1)), "got 1 for 2 turns"),
        ((prompt(1), action(2), observation(3)), (turn(),), "must end with an action segment"),
        ((prompt(1), action(2), glue(3), action(4)), (turn(**END), turn(index=1)), "only the last turn"),
    ],
)
def test_sample_refuses(segments, turns, message):
    with pytest.raises(ValueError, match=message):
        Sample(segments, turns)


def test_types_cannot_be_changed():
    sample = Sample((prompt(1), action(2)), (turn(),))
    for thing, field in ((sample.segments[0], "input"), (turn(), "reward"), (sample, "turns")):
        with pytest.raises(AttributeError):
            setattr(thing, field, ())
    assert replace(turn(), reward=2.0).reward == 2.0
