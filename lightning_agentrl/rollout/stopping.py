"""Leaving work before its end: who asks for it, where a rank may, and how all ranks do it together."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import all_gather, raise_once, rank
from lightning_agentrl.errors import EngineGoneError, one_line


class Stopped(SystemExit):
    """The end of a run that was asked to end, raised on all ranks where the run can be continued from.

    The exit code is that of a process ended by the signal, on the first rank; on others it is 0, since a launcher that
    sees another code kills the first one before it has said what happened.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number if rank() == 0 else 0)
        self.number = number


class _Left(Exception):
    """This rank leaves its work; caught where all ranks meet."""


class Stopping:
    """What a run is asked for while it works: to end, or to save and go on.

    Any thread may ask, on any rank. A rank that works alone looks whether to leave, and the ranks agree once each of
    them is through or has left: after a collection, a scoring, a validation and an update.
    """

    def __init__(self) -> None:
        self.asked = 0  # number of the signal that asks to end; 0: none
        self.reason = ""  # why it ends without a signal
        self.saves = 0  # how often it was asked to save and go on
        self.save: Callable[[], object] | None = None  # None: nobody handles an end
        self._saved = 0
        self._inside = False  # work that may be left

    def begin(self, save: Callable[[], object]) -> None:
        """Forget what an earlier run was asked for.

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
    def apart(self) -> Iterator[None]:
        """Work inside :meth:`together` in which ranks do not wait for each other; then all go on, or all leave."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised again below
            error = self._or_left(raised) if self._inside else raised
        if self._inside and (asked := max(all_gather(self.asked))):
            self.asked = asked
            raise error or _Left
        with raise_once():
            if error is not None:
                raise error

    @contextmanager
    def together(self, alone: bool = False) -> Iterator[None]:
        """Work that a rank may leave; then agree. All ranks enter and leave together.

        An engine that is gone ends the run as SIGTERM would.

        Args:
            alone: ranks do not wait for each other inside, so an error of one is told to all at the end.

        Raises:
            Stopped: see :meth:`agree`.
        """
        error: Exception | None = None
        self._inside = True
        try:
            yield
        except Exception as raised:
            error = self._or_left(raised)
            if not (self.asked or alone):
                raise
        finally:
            self._inside = False
        if self.asked and error is not None and not isinstance(error, _Left):  # of an engine that another rank has left
            kind = type(error).__name__
            rank_zero_warn(f"the run is asked to end, and its work ended with {kind}: {one_line(str(error))}")
        self._agree(failed=error is not None)
        if alone:
            with raise_once():
                if error is not None:
                    raise error

    def _or_left(self, error: Exception) -> Exception:
        """Return the error of some work; that of an engine that is gone asks to end, and is one of leaving."""
        if not isinstance(error, EngineGoneError) or self.save is None or self.asked:
            return error
        self.reason = one_line(str(error))
        self.ask(signal.SIGTERM)
        return _Left()

    def agree(self) -> None:
        """Do what any rank is asked for. All ranks must call it, where the run can be continued from.

        Raises:
            Stopped: on all ranks, if one is asked to end.
        """
        self._agree(failed=False)

    def _agree(self, failed: bool) -> None:
        """Do the same after work that may have failed on this rank: what cannot be continued from is not saved."""
        wishes = all_gather((self.asked, self.saves, failed))
        asked, saves, failures = (max(of_ranks) for of_ranks in zip(*wishes, strict=True))
        if asked:
            self.asked = asked
            raise Stopped(asked)
        if saves > self._saved and self.save is not None and not failures:
            self._saved = saves
            self.save()
