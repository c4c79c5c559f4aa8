"""Admission of requests to the running batch: by a fixed rule over the players, or as they come."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch

from lightning_agentrl.engines.base import Reply, SamplingRequest, Waiting

Rule = Literal["by_number", "as_they_come"]


class Seat:
    """Seat of one player. Requests made inside it are the player's; without a request the player is away."""

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


@dataclass(eq=False)
class Draft(Waiting):
    """A request and what was sampled for it, from when it came until its reply is there.

    Its random numbers are drawn when it comes, so batching cannot change it.
    """

    seat: Seat | None  # of the player who asks; None: of nobody in a seat
    after: int  # number of admissions before it came
    settled: bool = False  # it was answered, or its caller has left
    done: bool = False  # all of it is sampled
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.late = self.seat is not None and self.seat.late  # the others had gone on without it
        self.order = self.after, request.number, request.seed, request.temperature
        random = torch.Generator().manual_seed(request.seed)
        self.shares = torch.rand(
            request.max_tokens, generator=random, dtype=torch.float64
        ).numpy()  # one for each token

    @property
    def over(self) -> bool:
        """Whether no more tokens are needed: the reply is done, or its request was canceled."""
        return self.done or self.settled


class Admission:
    """Queue between the callers and the thread that samples.

    By number: before anything is admitted, every player is asking or has left its seat. So which requests are there
    follows from the replies before, whatever takes how long. Those that came between the same two admissions are
    ordered by their numbers.

    Args:
        rule: by number, or as they come.
        every: steps of sampling from one admission to the next, by number.
        absence_seconds: after which a player that is away is not waited for.
        gather_seconds: time that the first request waits for others if the number of players is unknown.
    """

    def __init__(self, rule: Rule, every: int, absence_seconds: float, gather_seconds: float) -> None:
        self.by_number = rule == "by_number"
        self.every = every
        self.absence_seconds = absence_seconds
        self.gather_seconds = gather_seconds
        self._changed = threading.Condition()  # guards all that follows
        self._seats: set[Seat] = set()
        self._queue: list[Draft] = []
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
            self._changed.notify()
        try:
            yield seats
        finally:
            for seat in seats:
                self.leave(seat)

    def leave(self, seat: Seat) -> None:
        """Expect nothing more from a seat."""
        with self._changed:
            self._seats.discard(seat)
            if not self._awaited():
                self._changed.notify()

    def ask(self, request: SamplingRequest, future: asyncio.Future[Reply]) -> Draft:
        """Take a request, and the future for its reply.

        Raises:
            RuntimeError: the desk is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine was stopped")
            seat = _SEAT.get()
            draft = Draft(request, future, seat if seat in self._seats else None, self._admissions)
            if draft.seat is not None:
                draft.seat.asks += 1
                draft.seat.late = False
            self._queue.append(draft)
            self._came_at = time.monotonic()
            if not self._awaited():  # so the thread that samples wakes once a batch, not at each request
                self._changed.notify()
            return draft

    def settle(self, drafts: Sequence[Draft]) -> None:
        """Note that requests are about to be answered, or that their callers have left."""
        with self._changed:
            for draft in drafts:
                if draft.settled:
                    continue
                draft.settled = True
                if draft in self._queue:
                    self._queue.remove(draft)
                if draft.seat is not None:
                    draft.seat.asks -= 1
                    draft.seat.away_since = time.monotonic()
            self._changed.notify()

    def _awaited(self) -> list[Seat]:
        """Return the seats of players who are between two requests, and not for too long."""
        return [seat for seat in self._seats if not seat.asks and not seat.late]

    # For the thread that samples

    def next(self, room: int, running: bool) -> list[Draft] | None:
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
                self._queue.sort(key=attrgetter("order"))
            admitted, self._queue = self._queue[:room], self._queue[room:]
            self._admissions += 1
            self._steps_left = self.every - 1 if self.by_number else 0
            return admitted

    def _seconds_to_wait(self, room: int, running: bool) -> float:
        """Return how long to wait for a change at most; 0: no longer."""
        now = time.monotonic()
        for seat in self._awaited():
            if seat.away_since + self.absence_seconds <= now:
                seat.late = True
                warnings.warn(
                    f"an environment asked for nothing for {self.absence_seconds:g} s (key data.init_args.engine."
                    "init_args.absence_seconds); the others go on, and this run cannot be repeated to the bit",
                    stacklevel=1,
                )
        if awaited := self._awaited():
            return min(map(attrgetter("away_since"), awaited)) + self.absence_seconds - now
        if running or len(self._queue) >= room:
            return 0.0
        if not self._queue:
            return math.inf
        return 0.0 if self._seats else max(0.0, self._came_at + self.gather_seconds - now)

    def close(self) -> list[Draft]:
        """Take and admit nothing more, and return what was never admitted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            rest, self._queue = self._queue, []
            return rest
