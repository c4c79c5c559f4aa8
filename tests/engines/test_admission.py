"""Which requests join those that are sampled: by a fixed rule that no time can change, or as they come."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from lightning_agentrl.engines import SamplingRequest
from lightning_agentrl.engines.transformers.admission import Admission, Draft, Seat
from lightning_agentrl.types import ModelInput

Ask = Callable[..., Draft]
QUIET = 0.05  # seconds in which nothing may happen


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Ask as the player of a seat."""
    loop = asyncio.new_event_loop()

    def ask(desk: Admission, seat: Seat | None, *number: int, seed: int = 0) -> Draft:
        request = SamplingRequest(ModelInput.of_ids((1, 2, 3)), 4, 1.0, seed, number)
        player = contextvars.copy_context()
        if seat is not None:
            player.run(seat.__enter__)
        return player.run(desk.ask, request, loop.create_future())

    yield ask
    loop.close()


@contextmanager
def a_desk(
    rule="by_number", every: int = 1, absence_seconds: float = 60.0, gather_seconds: float = 0.0
) -> Iterator[tuple[Admission, Callable[..., Future]]]:
    """A desk, and its `next` in a thread of its own."""
    desk = Admission(rule, every, absence_seconds, gather_seconds)
    with ThreadPoolExecutor(1) as thread:
        try:
            yield desk, lambda room=9, running=False: thread.submit(desk.next, room, running)
        finally:
            desk.close()


def admitted(found: Future) -> list[tuple[int, ...]]:
    return [draft.request.number for draft in found.result(timeout=30)]


def waits(found: Future) -> bool:
    return not wait([found], QUIET).done


@pytest.mark.parametrize("running", [False, True])
def test_nothing_is_sampled_while_a_player_is_between_two_requests(ask: Ask, running: bool) -> None:
    with a_desk() as (desk, following), desk.seats(3) as seats:
        first = following(running=running)
        ask(desk, seats[2], 2, 0)
        ask(desk, seats[0], 0, 0)
        assert waits(first)
        asked = ask(desk, seats[1], 1, 0)
        assert admitted(first) == [(0, 0), (1, 0), (2, 0)]
        assert admitted(following(running=True)) == []  # all are being sampled
        desk.settle([asked])
        second = following(running=True)
        assert waits(second)
        ask(desk, seats[1], 1, 1)
        assert admitted(second) == [(1, 1)]


def test_a_player_that_asks_no_more_is_not_waited_for(ask: Ask) -> None:
    with a_desk() as (desk, following), desk.seats(2) as seats:
        ask(desk, seats[0], 0, 0)
        first = following()
        assert waits(first)
        desk.leave(seats[1])
        assert admitted(first) == [(0, 0)]


def test_those_who_fail_leave_nobody_to_wait_for(ask: Ask) -> None:
    """A collection that ends with an error leaves its seats, even those of tasks that were never begun."""
    with a_desk() as (desk, following):
        with pytest.raises(OSError, match="broken"), desk.seats(3):
            raise OSError("broken")
        ask(desk, None, 5, 0)
        assert admitted(following()) == [(5, 0)]


def test_the_order_is_of_admissions_first_and_then_of_numbers(ask: Ask) -> None:
    with a_desk() as (desk, following), desk.seats(4) as seats:
        for i in (3, 1, 0, 2):
            last = ask(desk, seats[i], i, 0)
        assert admitted(following(room=2)) == [(0, 0), (1, 0)]
        desk.settle([last])  # of number 2, who was waiting and is cancelled
        ask(desk, seats[2], 2, 1)
        assert admitted(following(room=2, running=True)) == [(3, 0), (2, 1)]  # 3 has waited for longer


def test_equal_numbers_are_told_apart_by_seed(ask: Ask) -> None:
    with a_desk() as (desk, following), desk.seats(2) as seats:
        late, early = ask(desk, seats[0], 0, 0, seed=7), ask(desk, seats[1], 0, 0, seed=3)
        assert following().result(timeout=30) == [early, late]


def test_between_admissions_replies_grow_by_a_fixed_number_of_tokens(ask: Ask) -> None:
    with a_desk(every=3) as (desk, following), desk.seats(2) as seats:
        asked = [ask(desk, seats[i], i, 0) for i in range(2)]
        assert len(admitted(following())) == 2
        desk.settle([asked[0]])
        assert [admitted(following(running=True)) for _ in range(2)] == [[], []]
        third = following(running=True)
        assert waits(third)
        ask(desk, seats[0], 0, 1)
        assert admitted(third) == [(0, 1)]


def test_whoever_is_away_for_too_long_is_told_and_not_waited_for(ask: Ask) -> None:
    with a_desk(absence_seconds=0.2) as (desk, following), desk.seats(2) as seats:
        asked = ask(desk, seats[0], 0, 0)
        with pytest.warns(UserWarning, match=r"0\.2 s.*absence_seconds.*cannot be repeated"):
            assert admitted(following()) == [(0, 0)]
        assert not asked.late
        assert admitted(following(running=True)) == []  # not told again
        late = ask(desk, seats[1], 1, 0)
        assert late.late
        assert admitted(following(running=True)) == [(1, 0)]
        desk.settle([late])
        back = following(running=True)
        assert waits(back)  # it is a player like any other again
        assert not ask(desk, seats[1], 1, 1).late
        assert admitted(back) == [(1, 1)]


def test_if_all_are_away_for_too_long_the_first_to_come_goes_on(ask: Ask) -> None:
    with a_desk(absence_seconds=0.1) as (desk, following), desk.seats(2) as seats:
        with pytest.warns(UserWarning, match="absence_seconds"):
            assert not wait([first := following()], 0.3).done
        ask(desk, seats[1], 1, 0)
        assert admitted(first) == [(1, 0)]


def test_a_player_who_asks_for_two_replies_is_away_when_both_are_there(ask: Ask) -> None:
    with a_desk() as (desk, following), desk.seats(1) as seats:
        one, two = ask(desk, seats[0], 0, 0), ask(desk, seats[0], 0, 1)
        assert len(admitted(following())) == 2
        desk.settle([one])
        desk.settle([one])  # nothing is counted twice
        assert admitted(following(running=True)) == []
        desk.settle([two])
        assert waits(following(running=True))


def test_as_they_come_nobody_is_waited_for(ask: Ask) -> None:
    with a_desk("as_they_come", every=5) as (desk, following):
        for number in (3, 1, 2):
            ask(desk, None, number, 0)
        assert admitted(following(room=2)) == [(3, 0), (1, 0)]
        assert admitted(following(room=2, running=True)) == [(2, 0)]
        assert admitted(following(room=2, running=True)) == []
        idle = following()
        assert waits(idle)
        ask(desk, None, 4, 0)
        assert admitted(idle) == [(4, 0)]


def test_the_first_to_come_waits_for_company(ask: Ask) -> None:
    with a_desk("as_they_come", gather_seconds=0.5) as (desk, following):
        first = following()
        ask(desk, None, 1, 0)
        assert waits(first)
        ask(desk, None, 2, 0)
        assert admitted(first) == [(1, 0), (2, 0)]
