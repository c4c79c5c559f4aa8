"""vLLM's thread where several ranks hold one engine together: they make the same steps with the requests of all."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lightning_agentrl.engines.base import Reply, SamplingRequest
from lightning_agentrl.engines.vllm.thread import Abort, Ask, Asker, Ended, Handling, VLLMThread
from lightning_agentrl.errors import one_line

PAUSE = 0.005  # seconds that a rank waits for requests of its own, while its group samples nothing
FAREWELL = 10.0  # seconds that a rank which fails waits for its group to hear of it


@dataclass(frozen=True)
class News:
    """What a rank tells its group before a step."""

    asks: tuple[tuple[str, SamplingRequest], ...] = ()
    forgets: tuple[str, ...] = ()
    done: bool = False  # asks for nothing more
    fault: str = ""  # why it stops


@dataclass(frozen=True)
class Elsewhere:
    """Who asked on another rank, and reads the reply there."""

    request: SamplingRequest

    def tell(self, outcome: Reply | Exception) -> None:
        pass


Exchange = Callable[[int, News | None], list[tuple[int, News | None]]]


class LockstepThread(VLLMThread):
    """While the ranks of a group collect, they exchange what was asked of each before every step.

    So all of them give the same requests to vLLM in the same order, make the same steps, and see all replies; each
    hands out those it was asked for. One that has all its replies goes on until the others do. Between collections
    a rank does by itself what all ranks do alike: new weights, sleep.

    Args:
        handling: what is done with the engine.
        ranks: of the group.
        rank: this one.
        exchange: gives state and news of all ranks for those of this one.
    """

    def __init__(self, handling: Handling, ranks: tuple[int, ...], rank: int, exchange: Exchange) -> None:
        self._ranks, self._rank, self._exchange = ranks, rank, exchange
        self._done: set[int] | None = None  # ranks that ask for nothing more; None: between collections
        self._leaving: News | None = None  # the last news of this rank, once its collection is over
        self._left: Future[None] | None = None
        self._taken: dict[str, Asker] = {}  # out of the mail, and not yet in flight
        self._sampled = 0  # of all replies of this collection, equal on ranks that sampled the same tokens
        super().__init__(handling, prefix=f"{rank}:")

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Entered and left by all ranks of the group; an error on one of them reaches all.

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
            with suppress(Exception):  # its own error is told here
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
                item.waiting.tell(RuntimeError("with tensor_parallel, replies are sampled inside collecting() only"))
            else:
                self._take(engine, item)
        news = self._own_news()
        try:
            everything = self._exchange(hash((self._sampled, len(self._in_flight))), news)
        except RuntimeError as error:
            raise Ended(f"the ranks that share vLLM's weights are out of reach ({one_line(str(error))})") from error
        told = self._told(everything)
        for rank, of_rank in zip(self._ranks, told, strict=True):
            for name, request in of_rank.asks:
                self._begin(engine, Ask(name, self._taken.pop(name, Elsewhere(request))))
            for name in of_rank.forgets:
                self._take(engine, Abort(name))
            if of_rank.done:
                self._done.add(rank)
        if len(self._done) == len(self._ranks) and not self._in_flight and self._left is not None:
            self._done = None
            self._left.set_result(None)
        return True

    def _own_news(self) -> News | None:
        """What has come, and nothing if that is little enough to go without words."""
        forgets, fault, last = [], "", self._leaving
        wait = not self._in_flight
        with suppress(queue.Empty):
            while True:
                item = self._mail.get(wait, PAUSE)
                wait = False
                if item is None:
                    fault = "the engine was stopped"
                elif isinstance(item, Ask):
                    self._taken[item.name] = item.waiting
                elif isinstance(item, Abort):
                    forgets.append(item.name)
                else:
                    item.result.set_exception(RuntimeError("replies are still being sampled"))
        asks = tuple((name, asker.request) for name, asker in self._taken.items())
        done = last is not None and last.done and self._done is not None and self._rank not in self._done
        fault = fault or ("" if last is None else last.fault)
        news = News(asks, tuple(forgets), done, fault)
        return None if news == News() else news

    def _told(self, everything: list[tuple[int, News | None]]) -> list[News]:
        """The news of all ranks, if they can go on together.

        Raises:
            Ended: they cannot.
        """
        told = [of_rank or News() for _, of_rank in everything]
        faults = {rank: of_rank.fault for rank, of_rank in zip(self._ranks, told, strict=True) if of_rank.fault}
        if own := faults.get(self._rank):
            raise Ended(own)
        for rank, fault in faults.items():
            raise Ended(f"rank {rank}, which holds a part of vLLM's weights, has stopped ({fault})")
        if len({state for state, _ in everything}) > 1:
            raise Ended(f"the ranks {self._ranks[0]} to {self._ranks[-1]} of one vLLM have sampled different tokens")
        return told

    def _end(self, reason: Exception) -> None:
        super()._end(reason)
        for asker in self._taken.values():
            asker.tell(reason)
        if self._left is not None and not self._left.done():
            self._left.set_exception(reason)
