"""Requests to end a run early or to save it, on which all ranks agree when they synchronize."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import all_gather, raise_once, rank
from lightning_agentrl.errors import EngineGoneError, one_line


class Stopped(SystemExit):
    """End of a run by request, raised on all ranks at a point from which the run can continue.

    The exit code on rank 0 is that of a process ended by the signal. On other ranks the code is 0, since a launcher
    that gets another code kills rank 0 before rank 0 has printed its message.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number if rank() == 0 else 0)
        self.number = number


class _Left(Exception):
    """Raised when this rank leaves its work; caught when all ranks synchronize."""


class Stopping:
    """Requests to end a run, or to save it and continue, from any thread of any rank."""

    def __init__(self) -> None:
        self.asked = 0  # number of the signal that requests the end; 0 without a request
        self.reason = ""  # reason of an end without a signal
        self.saves = 0  # number of requests to save and continue
        self.save: Callable[[], object] | None = None  # function that saves the run; None before `begin`
        self._saved = 0  # number of completed requests to save
        self._inside = False  # whether this rank is inside `together`, which it may leave early

    def begin(self, save: Callable[[], object]) -> None:
        """Clear the requests of an earlier run.

        Args:
            save: function that saves the run; it is called on all ranks.
        """
        self.asked = self.saves = self._saved = 0
        self.reason, self.save = "", save

    def ask(self, number: int) -> None:
        """Request the end of the run, as after the signal with this number."""
        self.asked = number

    def look(self) -> None:
        """Leave the context :meth:`together` if the end of the run was requested."""
        if self.asked and self._inside:
            raise _Left

    @contextmanager
    def together(self, alone: bool = False) -> Iterator[None]:
        """Context of work that a rank may leave early. All ranks enter and leave it; its exit calls :meth:`agree`.

        An EngineGoneError inside ends the run like SIGTERM.

        Args:
            alone: whether ranks do not wait for each other inside, so that all ranks raise an error of one rank.

        Raises:
            Stopped: see :meth:`agree`.
        """
        self._inside = True
        try:
            with self.apart() if alone else self._leaving():
                yield
        except _Left:
            pass
        finally:
            self._inside = False
        self.agree()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context inside :meth:`together` in which ranks do not wait for each other. Then all ranks go on or leave."""
        with raise_once(), self._leaving():
            yield
        if self._inside and (asked := max(all_gather(self.asked))):
            self.asked = asked
            raise _Left

    def agree(self) -> None:
        """Carry out the requests of all ranks. All ranks must call this method at a point where the run can continue.

        Raises:
            Stopped: the end was requested on any rank; raised on all ranks.
        """
        saves = self.saves  # read once, since a signal may change the count
        requests = all_gather((self.asked, saves > self._saved))
        if asked := max(number for number, _ in requests):
            self.asked = asked
            raise Stopped(asked)
        self._saved = saves
        if self.save is not None and any(save for _, save in requests):
            self.save()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Catch errors of work that ends early, because the end of the run was requested or the engine is gone."""
        try:
            yield
        except _Left:
            pass
        except Exception as error:
            gone = isinstance(error, EngineGoneError) and self.save is not None and self._inside
            if not self.asked and not gone:
                raise
            if not self.asked:
                self.reason = one_line(str(error))
                self.ask(signal.SIGTERM)
            else:  # for example, the engine failed after another rank left
                kind = type(error).__name__
                rank_zero_warn(f"while the run is ending, its work failed with {kind}: {one_line(str(error))}")
