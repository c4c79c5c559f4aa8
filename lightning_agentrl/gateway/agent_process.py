"""Agent program in a separate process that ends, with all descendants, when its episode or the trainer ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO

from lightning_agentrl.gateway import descendants
from lightning_agentrl.gateway.warm import Warm

PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")  # variables that agents inherit
EXCERPT = 2000  # characters from the end of a program's output that an error shows
INFRASTRUCTURE = 75  # exit code that marks an episode as lost instead of failed; EX_TEMPFAIL of sysexits.h


class AgentProcess:
    """A running agent program.

    Args:
        command: program and arguments.
        variables: environment variables to set, in addition to the inherited variables.
        passed_on: names of further environment variables that the program inherits from the trainer.
        preload: modules that one Python interpreter imports before it forks for each program; if empty, each program
            starts a new interpreter.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        passed_on: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        # The file stays open as long as the program runs.
        self._written: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        own = {name: os.environ[name] for name in (*PASSED_ON, *passed_on) if name in os.environ}
        self._masked = [variables[name] for name in variables if "KEY" in name or "URL" in name]
        self._masked += [own[name] for name in passed_on if name in own and _is_secret(name)]
        self._code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if preload:
            warm = _warm(command[0], tuple(preload), tuple(own.items()))
            self._end, self._status = warm.start(command[1:], {**own, **variables}, self._written.fileno())
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", descendants.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=self._written,
            stderr=self._written,
            env={**own, **variables},
            start_new_session=True,
        )

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the program runs."""
        if self._process is not None:
            return self._process.poll()
        if self._code is None and select.select([self._status], [], [], 0)[0]:
            self._code = int(os.read(self._status, 16) or -signal.SIGKILL)
        return self._code

    def end(self) -> None:
        """End the program and all its descendants, by closing the standard input of their guard."""
        if self._process is None:
            os.close(self._end)
            if self._code is None:
                os.read(self._status, 16)
            os.close(self._status)
        else:
            with suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process.wait()
        self._written.close()

    def excerpt(self) -> str:
        """Return the end of the program's output, with secrets masked."""
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(size - EXCERPT, 0))
        text = self._written.read().decode(errors="replace").strip()
        for secret in filter(None, self._masked):
            text = text.replace(secret, "***")
        return text


@cache
def _warm(interpreter: str, modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Warm:
    return Warm(interpreter, modules, dict(variables))


def _is_secret(name: str) -> bool:
    return any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))
