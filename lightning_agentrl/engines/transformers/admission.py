"""Admission of requests to the running batch: by a deterministic rule, or in order of arrival."""

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
    """Context of one player. Requests made inside it belong to the player, who is away without a pending request."""

    def __init__(self, admission: Admission) -> None:
        self.asks = 0  # unanswered requests
        self.away_since = time.monotonic()
        self.late = False  # whether the player was away for too long, so that the other players continue
        self._admission = admission

    def __enter__(self) -> None:
        self._before: Token[Seat | None] = _SEAT.set(self)

    def __exit__(self, *_: Any) -> None:
        _SEAT.reset(self._before)
        self._admission.leave(self)


_SEAT: ContextVar[Seat | None] = ContextVar("seat", default=None)


@dataclass(eq=False)
class Draft(Waiting):
    """A request and the tokens sampled for it so far.

    Random numbers are drawn when the request arrives, so they do not depend on the batch.
    """

    seat: Seat | None  # seat of the requesting player; None: the request came from outside a seat
    after: int  # number of admissions before the request arrived
    settled: bool = False  # whether the request was answered or canceled
    done: bool = False  # whether the reply is complete
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.late = self.seat is not None and self.seat.late  # the other players had continued
        self.order = self.after, request.number, request.seed, request.temperature
        random = torch.Generator().manual_seed(request.seed)
        self.shares = torch.rand(
            request.max_tokens, generator=random, dtype=torch.float64
        ).numpy()  # one random number for each token

    @property
    def over(self) -> bool:
        """Whether no more tokens are needed: the reply is done, or the request was canceled."""
        return self.done or self.settled


class Admission:
    """Queue between the callers and the thread that samples.

    With the rule ``by_number``, an admission waits until every player has a pending request or has left its seat. So
    the set of pending requests follows from the earlier replies and not from timing. Requests that arrived between the
    same two admissions are ordered by ``SamplingRequest.number``.

    Args:
        rule: ``by_number``, or ``as_they_come`` for order of arrival.
        every: number of sampling steps between two admissions, with ``by_number``.
        absence_seconds: seconds after which admissions stop waiting for a player without a pending request.
        gather_seconds: seconds that the first request waits for other requests if the number of players is unknown.
    """

    def __init__(self, rule: Rule, every: int, absence_seconds: float, gather_seconds: float) -> None:
        self.by_number = rule == "by_number"
        self.every = every
        self.absence_seconds = absence_seconds
        self.gather_seconds = gather_seconds
        self._changed = threading.Condition()  # guards all attributes below
        self._seats: set[Seat] = set()
        self._queue: list[Draft] = []
        self._admissions = 0
        self._steps_left = 0  # sampling steps until the next admission
        self._came_at = 0.0  # time of the last request
        self._closed = False

    # Methods for callers

    @contextmanager
    def seats(self, players: int) -> Iterator[list[Seat]]:
        """Make each admission wait for ``players`` players, until all players have left their seats."""
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
        """Remove a seat, so that admissions no longer wait for its player."""
        with self._changed:
            self._seats.discard(seat)
            if not self._awaited():
                self._changed.notify()

    def ask(self, request: SamplingRequest, future: asyncio.Future[Reply]) -> Draft:
        """Queue a request together with the future for its reply.

        Raises:
            RuntimeError: the queue is closed.
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
            if not self._awaited():  # wake the sampling thread once per batch, not at each request
                self._changed.notify()
            return draft

    def settle(self, drafts: Sequence[Draft]) -> None:
        """Mark requests as answered or canceled."""
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
        """Return the seats of players without a pending request that are not late."""
        return [seat for seat in self._seats if not seat.asks and not seat.late]

    # Methods for the sampling thread

    def next(self, room: int, running: bool) -> list[Draft] | None:
        """Wait until the next admission is decided, and return the admitted requests in order.

        Args:
            room: largest number of requests to admit.
            running: whether replies are being sampled; if so, an empty list is a valid answer.

        Returns:
            The admitted requests; None if the queue is closed and no reply is being sampled.
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
        """Return the largest number of seconds to wait for a change; 0 means to admit now."""
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
        """Close the queue and return the requests that were never admitted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            rest, self._queue = self._queue, []
            return rest
