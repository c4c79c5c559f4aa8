"""How a command ends: a sentence, or labelled lines on a terminal, and the exit code."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_agentrl.commands.failures import explained
from lightning_agentrl.commands.places import places_of
from lightning_agentrl.errors import (
    ConfigError,
    EngineGoneError,
    EngineMismatchError,
    EnvError,
    RunStoppedError,
    causes,
)
from lightning_agentrl.errors.problem import LABELS

_BOLD, _DIM, _RED, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


@contextmanager
def one_line_errors(arguments: Sequence[str] | None = None) -> Iterator[None]:
    """Exit with a sentence and code 2 on wrong input, 130 on Ctrl-C, 1 on an error of environments or of the engine and
    after a run that stopped itself; with 141, and without a word unless a run was training, when the reader of the
    output has gone, as `head` does.

    Bugs keep their traceback.

    Args:
        arguments: of the command, in which a wrong key is looked up; those of the process if None.
    """
    try:
        try:
            yield
        except SystemExit:  # also of a parser that has shown its help
            _flush()
            raise
        _flush()
    except KeyboardInterrupt as stop:
        _write([f"agentrl: {str(stop) or 'stopped'}"])
        sys.exit(130)
    except Exception as error:
        if lost_reader(error):
            if notes := _notes(error):
                _write([f"agentrl: nobody reads the output any more; {'; '.join(notes)}"])
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains as it ends
            sys.exit(128 + signal.SIGPIPE)
        wrong_input = error if isinstance(error, ConfigError) else explained(error)
        if wrong_input is not None:
            _show(wrong_input, sys.argv[1:] if arguments is None else arguments)
            sys.exit(2)
        if not isinstance(error, EnvError | EngineGoneError | EngineMismatchError | RunStoppedError):
            raise
        trace = error.trace if isinstance(error, EnvError) else ""
        sentence = f"agentrl: {error}" + "".join(f" ({note})" for note in _notes(error))
        _write([*trace.rstrip("\n").splitlines(), sentence])
        sys.exit(1)


def lost_reader(error: BaseException) -> bool:
    """Return whether an error says that nobody reads the output of the process any more, not another pipe."""
    if not any(isinstance(cause, BrokenPipeError) for cause in causes(error)):
        return False
    try:
        polled = select.poll()
        polled.register(sys.stdout, 0)  # errors are told without being asked for
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in polled.poll(0))
    except (TypeError, ValueError, OSError):  # the output is none of the system
        return False


def _flush() -> None:
    """Write what was printed: as the process ends, it would be too late to say that it cannot be."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _show(error: ConfigError, arguments: Sequence[str]) -> None:
    """Write an error to standard error."""
    places, notes = places_of(error.problem, arguments), _notes(error)
    if sys.stderr.isatty():
        lines = error.problem.lines(places, notes, shutil.get_terminal_size().columns)
        _write(lines if os.environ.get("NO_COLOR") else _coloured(lines))
    else:
        _write([f"agentrl: {error.problem.sentence(places, notes)}"])


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error and its causes, each once."""
    return list(dict.fromkeys(note for cause in causes(error) for note in getattr(cause, "__notes__", ())))


def _coloured(lines: Sequence[str]) -> list[str]:
    head = lines[0].replace("agentrl:", f"{_RED}agentrl:{_OFF}{_BOLD}", 1) + _OFF
    return [head, *(_dimmed(line) for line in lines[1:])]


def _dimmed(line: str) -> str:
    """Make a line's label, if it has one, less prominent than its text."""
    label = next((label for label in LABELS if line.startswith(f"  {label} ")), "")
    width = len(line) - len(line[len(label) + 2 :].lstrip())
    return f"{_DIM}{line[:width]}{_OFF}{line[width:]}" if label else line


def _write(lines: Sequence[str]) -> None:
    """Write all lines at once, since several processes may write."""
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
