"""The benchmarks of engines: the ideal that rollouts are held against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines.alone import interpolated
from benchmarks.engines.routing import same, simulated
from benchmarks.engines.simulation import simulated_seconds
from lightning_agentrl.engines.vllm_server.routing import preferred


def test_one_environment_takes_turns_with_the_engine() -> None:
    seconds = simulated_seconds([[2, 3]], [[5.0, 7.0]], lambda rows, new: 1.0 + 10.0 * new)
    assert seconds == (11 + 1) + 5 + (11 + 1 + 1) + 7


def test_a_request_that_comes_inside_a_step_waits_for_its_end() -> None:
    # 0-2: both begin; 2-4: env 0 ends. It comes back at 4.5, inside the step 4-6, and joins in 6-8; env 1 ends at 6.
    seconds = simulated_seconds([[2, 1], [3]], [[0.5, 1.0], [0.0]], lambda rows, new: 2.0)
    assert seconds == 8 + 1.0


def test_an_idle_engine_begins_when_the_next_request_comes() -> None:
    assert simulated_seconds([[1, 1], [1]], [[100.0, 0.0], [3.0]], lambda rows, new: 1.0) == 102.0


def test_by_number_all_are_waited_for_at_admissions_only() -> None:
    # 0-2: both begin; 2-4: env 0 ends, and comes back at 4.5. It joins in 4.5-6.5, at whose end both are done.
    assert simulated_seconds([[2, 1], [3]], [[0.5, 1.0], [0.0]], lambda rows, new: 2.0, admit_every=1) == 6.5 + 1.0
    # The first admission is at 0 and the next when nothing is running: env 1 ends at 6, env 0 joins in 6-8.
    assert simulated_seconds([[2, 1], [3]], [[0.5, 1.0], [0.0]], lambda rows, new: 2.0, admit_every=4) == 8 + 1.0
    # Env 0 comes back at 2.5 and is waited for before the third step.
    assert simulated_seconds([[1, 1], [4]], [[1.5, 0.0], [0.0]], lambda rows, new: 1.0, admit_every=2) == 2.5 + 2.0


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 9)), min_size=1, max_size=5), min_size=1, max_size=5),
    st.floats(0.1, 2),
)
def test_no_environment_is_done_before_its_own_delays_and_steps(
    turns: list[list[tuple[int, float]]], step: float
) -> None:
    replies = [[tokens for tokens, _ in env] for env in turns]
    delays = [[delay for _, delay in env] for env in turns]
    seconds = simulated_seconds(replies, delays, lambda rows, new: step)
    own = [sum(map(sum, ([step * n for n in r], d))) for r, d in zip(replies, delays, strict=True)]
    assert seconds >= max(own) - 1e-9
    assert seconds <= sum(own) + step * sum(map(len, replies)) + 1e-9  # never idle while somebody could go on


def test_between_measured_rows() -> None:
    assert interpolated({1: 10.0, 4: 16.0}, 2) == pytest.approx(12.0)
    assert interpolated({1: 10.0, 4: 16.0}, 4) == 16.0


def test_ranks_that_prefer_different_servers_load_them_evenly_and_read_no_more() -> None:
    """Before and after, as counted by hand: with 8 blocks in common, three of a rank's four go to its first server."""
    before, after = simulated(8, 4, 4, same), simulated(8, 4, 4, preferred)
    assert (before.at_first, after.at_first) == ([24, 8, 0, 0], [8, 8, 8, 8])
    assert (before.moved, after.moved) == (0, 0)  # each episode stays where its past is cached
    assert (before.read_again, after.read_again) == (8, 3 * 8)  # the beginning, once on each further server
    lost = simulated(8, 4, 4, preferred, lost=0)
    assert lost.moved >= 8  # all that were there
    assert max(lost.busiest) < max(simulated(8, 4, 4, same, lost=0).busiest)
