"""vLLM's thread if several ranks share one engine: they make the same steps with the requests of all."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.thread import Abort, Ask, Ended, Handling, VLLMThread
from lightning_agentrl.errors import one_line

PAUSE = 0.005  # seconds that a rank waits for its own requests while its group is idle
FAREWELL = 10.0  # seconds that a failing rank waits for its group to notice


@dataclass(frozen=True)
class News:
    """The message of a rank to its group before a step."""

    asks: tuple[tuple[str, SamplingRequest], ...] = ()
    aborts: tuple[str, ...] = ()
    done: bool = False  # this rank has no more requests
    fault: str = ""  # why it stops


Exchange = Callable[[int, News | None], list[tuple[int, News | None]]]


class LockstepThread(VLLMThread):
    """A thread in which the ranks of a group exchange their requests before every step of a collection.

    So all ranks give vLLM the same requests in the same order, make the same steps and see all replies; each returns
    the replies to its own requests. A rank that is done continues until the others are. Between collections
    each rank does on its own what all do alike: load weights, sleep.

    Args:
        handling: functions that operate the engine.
        ranks: ranks of the group.
        rank: this rank.
        exchange: returns state and news of all ranks, given those of this one.
    """

    def __init__(self, handling: Handling, ranks: tuple[int, ...], rank: int, exchange: Exchange) -> None:
        self._ranks, self._rank, self._exchange = ranks, rank, exchange
        self._done: set[int] | None = None  # ranks without further requests; None: between collections
        self._leaving: News | None = None  # the last news of this rank, once its collection is over
        self._left: Future[None] | None = None
        self._taken: dict[str, Ask] = {}  # taken out of the mailbox, and not yet in flight
        self._sampled = 0  # hash of all replies of this collection, equal on ranks that sampled the same tokens
        super().__init__(handling, prefix=f"{rank}:")

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect with all ranks of the group, which enter and leave together; an error on one reaches all.

        Raises:
            RuntimeError: another rank has failed.
        """
        left = self._left = Future()
        self._leaving = None
        self.call(lambda _: self._enter())
        try:
            yield
        except BaseException as error:
            self._leaving = News(fault=f"{type(error).__name__}: {one_line(str(error))}")
            with suppress(Exception):  # its own error is raised here
                left.result(FAREWELL)
            raise
        self._leaving = News(done=True)
        left.result()

    def _enter(self) -> None:
        self._done, self._sampled = set(), 0

    def _reply(self, output: Any) -> Reply:
        reply = super()._reply(output)
        self._sampled = (self._sampled + hash(reply.ids)) % 2**62  # in whatever order replies are read
        return reply

    def _read_mail(self, engine: Any) -> bool:
        while self._done is None:
            item = self._mail.get()
            if item is None:
                return False
            if isinstance(item, Ask):
                item.tell(RuntimeError("with tensor_parallel, replies are sampled inside collecting() only"))
            else:
                self._take(engine, item)
        news = self._own_news()
        try:
            everything = self._exchange(hash((self._sampled, len(self._in_flight))), news)
        except RuntimeError as error:
            raise Ended(f"the ranks that share vLLM's weights cannot be reached ({one_line(str(error))})") from error
        for rank, of_rank in zip(self._ranks, self._news_of_all(everything), strict=True):
            for name, request in of_rank.asks:
                elsewhere = Ask(name, request, lambda outcome: None)  # its own rank reads the reply too
                self._begin(engine, self._taken.pop(name, elsewhere))
            for name in of_rank.aborts:
                self._take(engine, Abort(name))
            if of_rank.done:
                self._done.add(rank)
        if len(self._done) == len(self._ranks) and not self._in_flight and self._left is not None:
            self._done = None
            self._left.set_result(None)
        return True

    def _own_news(self) -> News | None:
        """Return the news of this rank, or None if the state alone says enough."""
        aborts, fault, last = [], "", self._leaving
        wait = not self._in_flight
        with suppress(queue.Empty):
            while True:
                item = self._mail.get(wait, PAUSE)
                wait = False
                if item is None:
                    fault = "the engine was stopped"
                elif isinstance(item, Ask):
                    self._taken[item.name] = item
                elif isinstance(item, Abort):
                    aborts.append(item.name)
                else:
                    item.result.set_exception(RuntimeError("replies are still being sampled"))
        asks = tuple((ask.name, ask.request) for ask in self._taken.values())
        done = last is not None and last.done and self._done is not None and self._rank not in self._done
        fault = fault or ("" if last is None else last.fault)
        news = News(asks, tuple(aborts), done, fault)
        return None if news == News() else news

    def _news_of_all(self, everything: list[tuple[int, News | None]]) -> list[News]:
        """Return the news of all ranks, if they can continue together.

        Raises:
            Ended: they cannot continue.
        """
        news = [of_rank or News() for _, of_rank in everything]
        faults = {rank: of_rank.fault for rank, of_rank in zip(self._ranks, news, strict=True) if of_rank.fault}
        if own := faults.get(self._rank):
            raise Ended(own)
        for rank, fault in faults.items():
            raise Ended(f"rank {rank}, which holds a part of vLLM's weights, has stopped ({fault})")
        if len({state for state, _ in everything}) > 1:
            raise Ended(
                f"the ranks {self._ranks[0]} to {self._ranks[-1]} of one vLLM engine have sampled different tokens"
            )
        return news

    def _end(self, reason: Exception) -> None:
        super()._end(reason)
        for ask in self._taken.values():
            ask.tell(reason)
        if self._left is not None and not self._left.done():
            self._left.set_exception(reason)
