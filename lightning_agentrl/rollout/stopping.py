"""Early stop of work: one flag, which each rank reads, and on which all ranks agree when they synchronize."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import all_gather, raise_once, rank
from lightning_agentrl.errors import EngineGoneError, one_line


class Stopped(SystemExit):
    """End of a run by request, raised on all ranks at a place from which the run can continue.

    The exit code is that of a process ended by the signal, on the first rank; on others it is 0, since a launcher that
    sees another code kills the first one before it has said what happened.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number if rank() == 0 else 0)
        self.number = number


class _Left(Exception):
    """Raised when this rank leaves its work; caught when all ranks synchronize."""


class Stopping:
    """Requests to end a run, or to save it and continue, from any thread of any rank."""

    def __init__(self) -> None:
        self.asked = 0  # number of the signal that asks to end; 0: none
        self.reason = ""  # why it ends without a signal
        self.saves = 0  # requests to save and go on
        self.save: Callable[[], object] | None = None  # None: an end is not handled
        self._saved = 0  # of these requests
        self._inside = False  # work that may be left

    def begin(self, save: Callable[[], object]) -> None:
        """Forget the requests to an earlier run.

        Args:
            save: saves the run; called on all ranks.
        """
        self.asked = self.saves = self._saved = 0
        self.reason, self.save = "", save

    def ask(self, number: int) -> None:
        """Ask the run to end as if this signal had come."""
        self.asked = number

    def look(self) -> None:
        """Leave the work of :meth:`together` if the run is asked to end."""
        if self.asked and self._inside:
            raise _Left

    @contextmanager
    def together(self, alone: bool = False) -> Iterator[None]:
        """Work that a rank may leave; then agree. All ranks enter and leave together.

        An engine that is gone ends the run as SIGTERM would.

        Args:
            alone: ranks do not wait for each other inside, so all raise an error of one.

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
        """Work inside :meth:`together` in which ranks do not wait for each other; then all go on, or all leave."""
        with raise_once(), self._leaving():
            yield
        if self._inside and (asked := max(all_gather(self.asked))):
            self.asked = asked
            raise _Left

    def agree(self) -> None:
        """Carry out requests to any rank. All ranks must call it, at a place from which the run can continue.

        Raises:
            Stopped: on all ranks, if one is asked to end.
        """
        saves = self.saves  # once: a signal may come meanwhile
        requests = all_gather((self.asked, saves > self._saved))
        if asked := max(number for number, _ in requests):
            self.asked = asked
            raise Stopped(asked)
        self._saved = saves
        if self.save is not None and any(save for _, save in requests):
            self.save()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Catch what ends work because the run is asked to end, or because its engine is gone."""
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
            else:  # an engine that another rank has left
                kind = type(error).__name__
                rank_zero_warn(f"the run is asked to end, and its work ended with {kind}: {one_line(str(error))}")
