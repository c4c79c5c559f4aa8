"""How a command ends: a sentence, the exit code, and whose traceback is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from lightning_agentrl.commands.ending import one_line_errors
from lightning_agentrl.errors import EnvError
from tests.cli import Command, Config, changed


def end(error: BaseException, *arguments: str) -> int:
    """Exit code of a command that ends with an error."""
    with pytest.raises(SystemExit) as stop, one_line_errors(arguments):
        raise error
    return int(stop.value.code or 0)


def test_the_rest_keeps_its_own_ending(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(KeyboardInterrupt("stopped after iteration 2")) == 130
    assert capsys.readouterr().err == "agentrl: stopped after iteration 2\n"
    with pytest.raises(ZeroDivisionError), one_line_errors([]):
        raise ZeroDivisionError


# A reader that has gone


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe that nobody reads any more."""
    end, beginning = os.pipe()
    os.close(end)
    with open(beginning, "w", closefd=False) as pipe:
        yield pipe
    os.close(beginning)


def test_a_command_whose_reader_has_gone_ends_like_others_without_a_word(unread: TextIO) -> None:
    command = [sys.executable, "-m", "lightning_agentrl", "--help"]
    ended = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.slow
def test_a_run_whose_reader_has_gone_says_where_it_was_stopped(
    unread: TextIO, config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    code, printed = agentrl(config=changed(config, "trainer.enable_progress_bar", True))
    assert code == 141
    (line,) = (line for line in printed.splitlines() if line.startswith("agentrl: "))
    assert "stopped after iteration 0" in line
    assert "Traceback" not in printed


def test_another_broken_pipe_keeps_its_traceback() -> None:
    with pytest.raises(BrokenPipeError), one_line_errors([]):
        raise BrokenPipeError("the pipe of a process")


# Environments

TRACE = """Traceback (most recent call last):
  File "my_games.py", line 35, in step
    raise IndexError("no such room")
IndexError: no such room
"""


@pytest.mark.parametrize("kind", ["IndexError", "MemoryError"])  # no key of ours would change how much memory it takes
def test_an_environment_shows_its_own_traceback_and_what_led_to_it(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = EnvError(kind, f"the environment raised {kind}: no such room", TRACE)
    error.add_note("environment 0, episode 3 with seed 7, in turn 2, action 'left'")
    assert end(error) == 1
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace == TRACE.splitlines()
    assert last.startswith(f"agentrl: the environment raised {kind}: no such room (")
    assert last.endswith("(environment 0, episode 3 with seed 7, in turn 2, action 'left')")


def test_an_environment_that_hung_has_no_traceback_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(EnvError("timeout", "step took more than 3 seconds")) == 1
    assert capsys.readouterr().err == "agentrl: step took more than 3 seconds\n"


def test_an_answer_that_is_none_of_an_environment_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    error = EnvError("contract", "step gave 4 values")
    error.add_note("environment 0")
    assert end(error) == 2
    assert capsys.readouterr().err == "agentrl: step gave 4 values (environment 0)\n"


@pytest.mark.parametrize("with_vllm", [True, False])
def test_what_is_written_once_python_has_ended_is_dropped_beside_vllm_alone(with_vllm: bool) -> None:
    """As nanobind's warnings of leaks are, from C; here by a handler of the C library."""
    script = f"""
import atexit, ctypes, sys
from lightning_agentrl.commands.ending import end_quietly
end_quietly()
atexit.register(lambda: print("still told", file=sys.stderr, flush=True))
if {with_vllm}:
    sys.modules["vllm"] = ctypes
libc = ctypes.CDLL(None)
text = ctypes.c_char_p(b"leaked")
libc.__cxa_atexit(libc.perror, text, None)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "still told" in ended.stderr
    assert ("leaked" in ended.stderr) is not with_vllm
