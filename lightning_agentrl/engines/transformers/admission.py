"""Which requests join the replies that are being sampled: by a fixed rule over who plays, or as they come."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Literal

from lightning_agentrl.engines.waiting import Waiting

Rule = Literal["by_number", "as_they_come"]


class Seat:
    """The place of one player. What is asked inside is its own; it is away while it asks for nothing."""

    def __init__(self, admission: Admission) -> None:
        self.asks = 0  # requests that were not answered yet
        self.away_since = time.monotonic()
        self.late = False  # away for too long, so the others go on
        self._admission = admission

    def __enter__(self) -> None:
        self._before: Token[Seat | None] = _SEAT.set(self)

    def __exit__(self, *_: Any) -> None:
        _SEAT.reset(self._before)
        self._admission.leave(self)


_SEAT: ContextVar[Seat | None] = ContextVar("seat", default=None)


class Asked:
    """A request, from when it came until its reply is there.

    Args:
        waiting: request and caller.
        seat: of the player who asks; None: of nobody in a seat.
        after: number of admissions before it came.
    """

    def __init__(self, waiting: Waiting, seat: Seat | None, after: int) -> None:
        self.waiting = waiting
        self.seat = seat
        self.late = seat is not None and seat.late  # the others had gone on without it
        self.settled = False  # it was answered, or its caller has left
        request = waiting.request
        self._order = after, request.number, request.seed, request.temperature

    def __lt__(self, other: Asked) -> bool:
        return self._order < other._order


class Admission:
    """The desk between those who ask and the thread that samples.

    By number: before anything is admitted, every player is asking or has left its seat. So which requests are there
    follows from the replies before, whatever takes how long. Those that came between the same two admissions are
    ordered by their numbers.

    Args:
        rule: by number, or as they come.
        every: steps of sampling from one admission to the next, by number.
        absence_seconds: after which a player that is away is not waited for.
        gather_seconds: for which the first request waits for another, where no players are known.
    """

    def __init__(self, rule: Rule, every: int, absence_seconds: float, gather_seconds: float) -> None:
        self.by_number = rule == "by_number"
        self.every = every
        self.absence_seconds = absence_seconds
        self.gather_seconds = gather_seconds
        self._changed = threading.Condition()  # guards all that follows
        self._seats: set[Seat] = set()
        self._away: set[Seat] = set()  # those of them that ask for nothing
        self._queue: list[Asked] = []
        self._admissions = 0
        self._steps_left = 0  # until the next admission
        self._came_at = 0.0  # the last request
        self._closed = False

    # For those who ask

    @contextmanager
    def seats(self, players: int) -> Iterator[list[Seat]]:
        """Expect so many players until each has left its seat."""
        seats = [Seat(self) for _ in range(players)]
        with self._changed:
            self._seats.update(seats)
            self._away.update(seats)
            self._changed.notify()
        try:
            yield seats
        finally:
            for seat in seats:
                self.leave(seat)

    def leave(self, seat: Seat) -> None:
        """Expect nothing more from a seat."""
        with self._changed:
            if seat in self._seats:
                self._seats.remove(seat)
                self._away.discard(seat)
                self._wake_sampler()

    def ask(self, waiting: Waiting) -> Asked:
        """Take a request.

        Raises:
            RuntimeError: the desk is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine was stopped")
            seat = _SEAT.get()
            asked = Asked(waiting, seat if seat in self._seats else None, self._admissions)
            if asked.seat is not None:
                asked.seat.asks += 1
                asked.seat.late = False
                self._away.discard(asked.seat)
            self._queue.append(asked)
            self._came_at = time.monotonic()
            self._wake_sampler()
            return asked

    def settle(self, asked: Asked) -> None:
        """Note that a request is about to be answered, or that its caller has left."""
        with self._changed:
            if asked.settled:
                return
            asked.settled = True
            if asked in self._queue:
                self._queue.remove(asked)
            if asked.seat is not None:
                asked.seat.asks -= 1
                asked.seat.away_since = time.monotonic()
                if not asked.seat.asks and asked.seat in self._seats:
                    self._away.add(asked.seat)
            self._changed.notify()

    def _wake_sampler(self) -> None:
        """Wake the thread that samples unless it waits for somebody else too: once a batch, not at each request."""
        if all(seat.late for seat in self._away):
            self._changed.notify()

    # For the thread that samples

    def next(self, room: int, running: bool) -> list[Asked] | None:
        """Wait until it is clear what joins now, and return it.

        Args:
            room: most requests.
            running: whether replies are being sampled; if so, nothing may join.

        Returns:
            The requests, in their order; None: the desk is closed, and nothing is running.
        """
        with self._changed:
            if running and self._steps_left:
                self._steps_left -= 1
                return []
            while not self._closed and (seconds := self._seconds_to_wait(room, running)):
                self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
            if self._closed:
                return [] if running else None
            if self.by_number:
                self._queue.sort()
            admitted, self._queue = self._queue[:room], self._queue[room:]
            self._admissions += 1
            self._steps_left = self.every - 1 if self.by_number else 0
            return admitted

    def _seconds_to_wait(self, room: int, running: bool) -> float:
        """Return how long to wait for a change at most; 0: no longer."""
        now = time.monotonic()
        away = [(seat, seat.away_since + self.absence_seconds - now) for seat in self._away]
        for seat, seconds in away:
            if seconds <= 0 and not seat.late:
                seat.late = True
                warnings.warn(
                    f"an environment asked for nothing for {self.absence_seconds:g} s (key data.init_args.engine."
                    "init_args.absence_seconds); the others go on, and this run cannot be repeated to the bit",
                    stacklevel=1,
                )
        if waited_for := [seconds for seat, seconds in away if not seat.late]:
            return min(waited_for)
        if running or len(self._queue) >= room:
            return 0.0
        if not self._queue:
            return math.inf
        return 0.0 if self._seats else max(0.0, self._came_at + self.gather_seconds - now)

    def close(self) -> list[Asked]:
        """Take and admit nothing more, and return what was never admitted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            rest, self._queue = self._queue, []
            return rest
