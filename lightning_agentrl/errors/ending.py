"""How the command ends: a sentence, or labelled lines on a terminal, and the exit code."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.frames import causes, environment_frames
from lightning_agentrl.errors.problem import LABELS, ConfigError, Problem, one_line
from lightning_agentrl.errors.running import runtime_error
from lightning_agentrl.errors.sources import Sources

_BOLD, _DIM, _RED, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


@contextmanager
def one_line_errors(arguments: Sequence[str] | None = None) -> Iterator[None]:
    """Wrong input ends with its sentence and exit code 2, Ctrl-C with one line and 130; bugs keep their traceback.

    Args:
        arguments: of the command, which tell where a wrong key was given; those of the process if None.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        _write([f"agentrl: {str(stop) or 'stopped'}"])
        sys.exit(130)
    except Exception as error:
        if told := runtime_error(error, stage=None):
            show(told, sys.argv[1:] if arguments is None else arguments)
            sys.exit(2)
        if isinstance(error, EnvError):
            _show_raised(error)
            sys.exit(1)
        if frames := environment_frames(error):
            _show_environment_error(error, frames)
            sys.exit(1)
        raise


def show(error: ConfigError, arguments: Sequence[str]) -> None:
    """Write an error to standard error."""
    problem = _in_parts(error)
    places = Sources(arguments).places(problem)
    notes = _notes(error)
    if sys.stderr.isatty():
        _write(
            problem.lines(places, notes, shutil.get_terminal_size().columns), coloured=not os.environ.get("NO_COLOR")
        )
    else:
        _write([f"agentrl: {problem.sentence(places, notes)}"])


def _in_parts(error: ConfigError) -> Problem:
    """The problem; where others have made a sentence of it on the way, as it was in parts."""
    for cause in causes(error):
        if isinstance(cause, ConfigError) and one_line(str(cause)) == one_line(str(error)) and cause.problem.key:
            return cause.problem
    return error.problem


def _notes(error: BaseException) -> list[str]:
    """What was added to an error and its causes on their way, each once."""
    return list(dict.fromkeys(note for cause in causes(error) for note in getattr(cause, "__notes__", ())))


def _show_environment_error(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> None:
    """The environment's part of the traceback, then which episode and action led to it."""
    kind = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    notes = _notes(error)
    happened = f" ({'; '.join(notes)})" if notes else f" (in {frames[0].name})"
    lines = "".join(traceback.format_list(list(frames))).rstrip("\n").split("\n")
    head = [*_own_cause(error), "Traceback (most recent call last):"]
    _write([*head, *lines, kind, f"agentrl: the environment raised {kind}{happened}"])


def _show_raised(error: EnvError) -> None:
    """The environment's own traceback, then which episode and action led to it."""
    where = "; ".join(_notes(error))
    _write([*error.trace.splitlines(), f"agentrl: {error}" + (f" ({where})" if where else "")])


def _own_cause(error: BaseException) -> list[str]:
    """What the environment raised its error from; a group is only how it came to us."""
    cause = error.__cause__
    if cause is None or isinstance(cause, BaseExceptionGroup):
        return []
    text = "".join(traceback.format_exception(cause)).rstrip("\n")
    return [*text.split("\n"), "", "The above exception was the direct cause of the following exception:", ""]


def _write(lines: Sequence[str], coloured: bool = False) -> None:
    """At once, since several processes may write."""
    if coloured:
        head = lines[0].replace("agentrl:", f"{_RED}agentrl:{_OFF}{_BOLD}", 1) + _OFF
        lines = [head, *(_dimmed(line) for line in lines[1:])]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _dimmed(line: str) -> str:
    """A line whose label, if it has one, is less prominent than its text."""
    label = next((label for label in LABELS if line.startswith(f"  {label} ")), "")
    width = len(line) - len(line[len(label) + 2 :].lstrip())
    return f"{_DIM}{line[:width]}{_OFF}{line[width:]}" if label else line
