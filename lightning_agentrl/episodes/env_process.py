"""Environment in a separate process: both ends of the pipe.

The process is a new interpreter that imports this file and with it only gymnasium and the errors, never torch or
transformers. The start methods of `multiprocessing` would import the main script with all its imports, and cannot set
the hash seed. The process ignores Ctrl-C. Its guard (:mod:`lightning_agentrl.gateway.descendants`) ends the
process with all descendants on request and when the trainer ends, and ends the descendants when the process ends.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lightning_agentrl.episodes.environment import Answer, AsEnvErrors, Environment
from lightning_agentrl.episodes.observation import CONTRACT, contract_error
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError, one_line

CLOSING_SECONDS = 5.0  # time limit to close the environment, and again to end its process
_SERVE = """
import sys
sys.path[:] = {path!r}
from lightning_agentrl.gateway.descendants import guard_descendants
guard_descendants()
from lightning_agentrl.episodes.env_process import serve
serve({pipe})
"""


class ProcessEnvironment:
    """The trainer's end of the pipe. The process starts at once; the first call waits until the environment exists.

    Args:
        recipe: recipe of the environment.
        timeout: time limit, in seconds, of each creation (without imports), ``reset``, ``step`` and drawing; None
            means no limit.

    Raises:
        ConfigError: the recipe cannot be sent to another process.
        EnvError: no process can be started.
    """

    def __init__(self, recipe: Recipe, timeout: float | None = None) -> None:
        order = pickled(recipe)
        self._key, self._timeout = recipe.key, timeout
        self._made = False
        self._answers = True  # whether the last call was answered
        try:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-c", _SERVE.format(path=sys.path, pipe=theirs.fileno())],
                    stdin=subprocess.PIPE,  # the guard acts when this pipe closes, with this object or process
                    pass_fds=(theirs.fileno(),),
                    env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
                    process_group=0,  # a separate group, so that Ctrl-C does not reach the process
                )
        except OSError as error:  # for example, a limit on processes or files is reached
            raise EnvError("start", f"the environment's process cannot be started: {_named(error)}") from None
        self._pipe.send_bytes(order)

    def wait(self) -> None:
        """Wait until the environment has been created."""
        if not self._made:
            self._receive("import", None)
            self._receive("make", self._timeout)
            self._made = True

    def reset(self, seed: int) -> Answer:
        return self._ask("reset", seed)

    def step(self, action: str) -> Answer:
        return self._ask("step", action)

    def draw(self) -> bytes:
        return self._ask("draw")

    def renew(self, seed: int) -> None:
        self._ask("renew", seed)

    def drew(self) -> bool:
        return self._ask("drew")

    def close(self) -> None:
        """Close the environment, then end the process. The process of a busy environment is ended at once."""
        try:
            if self._made and self._answers:
                self._ask("close", limit=CLOSING_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSING_SECONDS)
        finally:
            self.end()
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()
            self._answers = False
            self._pipe.close()

    def end(self) -> None:
        """End the process with its descendants, if the process is running. A waiting call fails."""
        if self._process.returncode is None:  # the process was not reaped, so its id was not reused
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)  # the guard's id; no environment can block the guard

    def _ask(self, call: str, *args: Any, limit: float | None = None) -> Any:
        self.wait()
        with suppress(OSError):  # the process has ended; the code below reports it
            self._pipe.send((call, args))
        return self._receive(call, limit or self._timeout)

    def _receive(self, call: str, limit: float | None) -> Any:
        """Wait at most ``limit`` seconds for the answer to a call and return it.

        Raises:
            EnvError: the call raised an error or took too long (kind ``timeout``), or the process ended (``died``).
            ConfigError: the environment cannot be created.
        """
        self._answers = False
        try:
            if not self._pipe.poll(limit):
                self.end()
                allowed = "" if call == "close" else f", the limit set by {self._key}.timeout_seconds"
                raise EnvError("timeout", f"the environment's {call} took longer than {limit:g} s{allowed}")
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):  # the process has ended; its guard ends all that could hold the pipe open
            code = self._process.wait()
            how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
            raise EnvError("died", f"the environment's process ended in {call} {how}") from None
        self._answers = True
        try:
            error, result = pickle.loads(answer)
        except Exception as error:  # noqa: BLE001 - the error's class may not exist in this process
            raise contract_error(
                f"the return value of the environment's {call} cannot be read in the trainer ({_named(error)}); return "
                "plain values"
            ) from None
        if error is not None:
            raise error(*result)
        return result


def pickled(recipe: Recipe) -> bytes:
    """Return the recipe as bytes for another process, with the registration of its id in this process.

    Raises:
        ConfigError: the recipe cannot be pickled, or the environment is registered only in the main script.
    """
    spec = None if ":" in recipe.id else recipe.spec
    entry = None if spec is None else spec.entry_point
    home = entry.split(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
    if home == "__main__":
        raise ConfigError(
            f"the environment '{recipe.id}' is registered in the main script, which is not run in the environment's "
            f"process (key {recipe.key}.id); move it to a module and write module:{recipe.id}, or set "
            f"{recipe.key}.worker to thread"
        )
    try:
        order = pickle.dumps(replace(recipe, registered=spec))
    except Exception as error:  # pickling the arguments may raise any exception
        raise _not_portable(recipe.id, recipe.key, error) from error
    return pickle.dumps((recipe.id, recipe.key, order))


def _not_portable(env_id: str, key: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the arguments of the environment '{env_id}' cannot be sent to its process: {_named(error)} (key "
        f"{key}.kwargs); give plain values, or objects of importable classes, or set {key}.worker to thread"
    )


def serve(pipe: int) -> None:
    """Answer the trainer's calls in the environment's process; ``pipe`` is a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # raised if the trainer is gone
        _Server(Connection(pipe)).run()


class _Server:
    """Server of the trainer's calls in the environment's process."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def run(self) -> None:
        running = self.answer(self.load) and self.answer(self.make)
        while running:
            call, args = self.pipe.recv()
            if call in ("reset", "renew"):
                _seed_globals(*args)
            self.answer(getattr(self.environment, call), *args)
            running = call != "close"

    def load(self) -> None:
        env_id, key, order = pickle.loads(self.pipe.recv_bytes())
        try:
            self.recipe = pickle.loads(order)
        except Exception as error:  # importing the arguments' modules may raise any exception
            raise _not_portable(env_id, key, error) from error
        with AsEnvErrors():
            self.recipe.load()

    def make(self) -> None:
        _seed_globals(0)
        self.environment = Environment(self.recipe.make, alone=True, texts=self.recipe.texts)

    def answer(self, call: Callable[..., Any], *args: Any) -> bool:
        """Send the result of a call, or the class and arguments of its error; return whether the call succeeded."""
        error: type[Exception] | None = None
        result: Any
        try:
            result = call(*args)
        except EnvError as raised:
            error, result = EnvError, (raised.kind, str(raised), raised.trace)
        except ConfigError as raised:
            error, result = ConfigError, (raised.problem,)
        try:
            data = pickle.dumps((error, result))
        except Exception as raised:  # noqa: BLE001 - pickling info may raise any exception
            what = _unsendable(result.info) if isinstance(result, Answer) else ""
            sentence = f"the environment's return value{what} cannot be sent to the trainer ({_named(raised)}); use"
            data = pickle.dumps((EnvError, (CONTRACT, f"{sentence} plain values", "")))
        self.pipe.send_bytes(data)
        return error is None


def _seed_globals(seed: int) -> None:
    """Seed Python's and numpy's global generators, so that games that use them are deterministic too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _unsendable(info: Mapping[str, Any]) -> str:
    """Return a phrase that names the first entry of info that cannot be pickled, or an empty string."""
    for name, value in info.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - pickling may raise any exception
            return f" info[{name!r}]"
    return ""


def _named(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")
