"""An agent program in a process of its own, which ends with its episode and with the trainer, children included."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from lightning_agentrl.episodes import descendants

PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")  # of the trainer's variables
EXCERPT = 2000  # characters of what a program wrote last, for an error
INFRASTRUCTURE = 75  # exit code of a program that could not do its work; as EX_TEMPFAIL of sysexits.h


class AgentProcess:
    """A running program.

    Args:
        command: program and arguments.
        variables: of its environment, beside those that are passed on.
        passed_on: names of further variables of the trainer that it gets.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], passed_on: Sequence[str] = ()) -> None:
        self._written: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the program
        own = {name: os.environ[name] for name in (*PASSED_ON, *passed_on) if name in os.environ}
        guarded = [sys.executable, "-I", "-S", descendants.__file__, *command]
        self._process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=self._written,
            stderr=self._written,
            env={**own, **variables},
            start_new_session=True,
        )
        self._masked = [variables[name] for name in variables if "KEY" in name or "URL" in name]
        self._masked += [own[name] for name in passed_on if name in own and _is_secret(name)]

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the program and all its descendants."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()  # the guard ends all that is left
        self._process.wait()
        self._written.close()

    def excerpt(self) -> str:
        """Return the end of what it wrote, without secrets."""
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(size - EXCERPT, 0))
        text = self._written.read().decode(errors="replace").strip()
        for secret in filter(None, self._masked):
            text = text.replace(secret, "***")
        return text


def find_program(command: Sequence[str]) -> str:
    """Return why a command cannot be started; empty if it can."""
    import shutil

    if not command:
        return "is empty"
    if shutil.which(command[0]) is None:
        return f"names the program '{command[0]}', which is not there"
    script = next((one for one in command[1:] if one.endswith(".py")), None)
    return f"names the file '{script}', which does not exist" if script and not Path(script).exists() else ""


def _is_secret(name: str) -> bool:
    return any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))
