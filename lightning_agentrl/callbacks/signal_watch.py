"""Learning of signals at once, on all ranks, also while the main thread waits inside torch."""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch.distributed as dist

from lightning_agentrl.distributed import rank
from lightning_agentrl.rollout.stopping import Stopping

LOOK_SECONDS = 0.5  # between two looks at what other ranks are asked for
CLOSE_SECONDS = 5.0  # for a thread's last look
TELL_SECONDS = 1.0  # to tell other ranks that the run ends at once
SECOND_AFTER = 1.0  # seconds in which one signal may come twice: `timeout` sends it to the process and to its group
_watches = itertools.count()  # as many on all ranks


class SignalWatch:
    """Two threads that pass signals on to :class:`Stopping`, of this rank and of all others.

    Python runs a handler once its main thread is free, which may wait inside torch for minutes. But the interpreter
    writes the number of a signal to a pipe at once, and one thread reads it there and keeps the time. Ranks tell each
    other through the store in which they met, so that it does not matter what their main threads wait for. That is a
    thread of its own, since who keeps the store may be stopped or cut off, and then it waits for ever.

    Must be made in the main thread. Signals that the process was started to ignore, as Ctrl-C in the background of a
    script, are left alone.

    Args:
        ends: signals that ask the run to end.
        saves: signals that ask it to save and go on.
        stopping: what the run looks at.
        grace_seconds: from the first signal to the end of the process, if the run has not ended by then.
        asked: called once the run is asked to end.
        ended: called with the reason before a thread ends the process.
    """

    def __init__(
        self,
        ends: Sequence[int],
        saves: Sequence[int],
        stopping: Stopping,
        grace_seconds: float,
        asked: Callable[[], object],
        ended: Callable[[str], object],
    ) -> None:
        heeded = [number for number in (*ends, *saves) if signal.getsignal(number) is not signal.SIG_IGN]
        self.ends, self.saves, self.stopping = ends, saves, stopping
        self.grace_seconds, self.asked, self.ended = grace_seconds, asked, ended
        self.ends_at: float | None = None  # by the monotonic clock, once the run is asked to end
        self._came_at: float | None = None  # the first signal, to this rank
        self._store = self._shared_store()
        self._new_saves = 0  # asked for here, and not known to other ranks
        self._counting = threading.Lock()  # guards these
        self._passed_on = False  # to other ranks, that the run is asked to end
        self._at_once = False  # a second signal came
        self._news, self._told = threading.Event(), threading.Event()  # for other ranks; they know of the second signal
        self._ending = threading.Lock()
        self._closed = False
        self._pipe, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._handler = _Placeholder()
        self._earlier = {number: signal.signal(number, self._handler) for number in heeded}
        works = {"signals": self._run} | ({} if self._store is None else {"signals of other ranks": self._exchange})
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and put the earlier handlers back, but not over those that somebody else has set since.

        Lightning puts back what was there before the run, and that before it takes callbacks down. The earlier handlers
        are Lightning's own then, and would leave the process deaf to SIGTERM.
        """
        if self._closed:
            return
        self._closed = True
        for number, handler in self._earlier.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that is not Python's
        signal.set_wakeup_fd(self._earlier_pipe)
        os.write(self._written, b"\0")
        self._news.set()
        reader, *others = self._threads
        reader.join()
        os.close(self._written)
        os.close(self._pipe)
        for thread in others:  # one that asks a node that cannot be reached ends with the process
            thread.join(CLOSE_SECONDS)

    def _shared_store(self) -> Any:
        name = f"signals {next(_watches)}"
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return cast(Any, dist).PrefixStore(name, dist.distributed_c10d._get_default_store())

    # In the threads

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._pipe], [], [], LOOK_SECONDS)
            numbers = os.read(self._pipe, 4096) if readable else b""
            if self._closed:
                return
            for number in numbers:
                self._came(number)
            if self.stopping.asked and self.ends_at is None:
                self.ends_at = time.monotonic() + self.grace_seconds
                self.asked()
            if self.ends_at is not None and time.monotonic() > self.ends_at:
                self._end(f"and it could not save within {self.grace_seconds:g} s")

    def _came(self, number: int) -> None:
        if number in self.saves:
            with self._counting:
                if self._store is None:
                    self.stopping.saves += 1
                else:
                    self._new_saves += 1
        if number == signal.SIGHUP:
            drop_lost_outputs()
        if number in self.ends:
            if self._came_at is None:
                self._came_at = time.monotonic()
                self.stopping.ask(number)
            elif time.monotonic() - self._came_at > SECOND_AFTER:
                self._at_once = True
                self._news.set()
                if self._store is not None:
                    self._told.wait(TELL_SECONDS)
                self._end("and a second one ended it at once")
        self._news.set()

    def _exchange(self) -> None:
        """Tell the other ranks what this one is asked for, and do what they are, until the store or the watch ends.

        A rank that ends with its watch tells them before.
        """
        closed = False
        while not closed:
            closed = self._closed
            self._news.clear()
            try:
                at_once = self._exchange_with(self._store)
            except RuntimeError:  # the rank that keeps the store is gone
                with self._counting:
                    self._store, self.stopping.saves = None, self.stopping.saves + self._new_saves
                at_once = self.stopping.asked > 0
            if at_once:
                self._end("and a second one ended it at once")
            if self._store is None:
                return
            if not closed:
                self._news.wait(LOOK_SECONDS)

    def _exchange_with(self, store: Any) -> bool:
        """Return whether a rank had a second signal."""
        new = self._new_saves
        self.stopping.saves = store.add("saves", new)
        with self._counting:
            self._new_saves -= new  # only now: nothing is told where the store is gone
        asked = self.stopping.asked  # once: a signal may come meanwhile
        if asked and not self._passed_on:
            store.set("end", str(asked))
            self._passed_on = True
        elif not asked and store.check(["end"]):
            self.stopping.ask(int(store.get("end")))
            self._passed_on = True
        if self._at_once:
            store.set("at once", "")
            self._told.set()
        return bool(store.check(["at once"]))

    def _end(self, reason: str) -> None:
        """End the process, whatever its other threads do."""
        self._ending.acquire()  # for good: one thread says why
        telling = threading.Thread(target=self.ended, args=(reason,), daemon=True)  # it asks a disk, which may stall
        telling.start()
        telling.join(CLOSE_SECONDS)
        if telling.is_alive():
            os.write(2, f"agentrl: stopped, {reason}; the disk of the checkpoints does not answer\n".encode())
        os._exit(128 + self.stopping.asked if rank() == 0 else 0)


def drop_lost_outputs() -> None:
    """Let what is written to a terminal that is gone, or to a pipe that nobody reads, go nowhere: no error ends the
    run before it is saved.
    """
    polled = select.poll()
    for number in (1, 2):
        polled.register(number, 0)  # errors are told without being asked for
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, event in polled.poll(0):
        if event & (select.POLLERR | select.POLLHUP):
            os.dup2(nowhere, number)
    os.close(nowhere)


class _Placeholder:
    """Does nothing: the number is in the pipe. Without a handler, none would be written there.

    Each watch has one of its own.
    """

    def __call__(self, number: int, frame: FrameType | None) -> None: ...


# A forked process has the pipe and the handlers too. Until it has forgotten them, no signal reaches it.
_fork = threading.local()


def _hold_signals() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget() -> None:
    if any(isinstance(signal.getsignal(number), _Placeholder) for number in signal.valid_signals()):
        signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if isinstance(signal.getsignal(number), _Placeholder):
            signal.signal(number, signal.SIG_DFL)
    _let_signals_through()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_through, after_in_child=_forget)
