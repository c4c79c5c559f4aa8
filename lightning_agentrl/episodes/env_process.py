"""An environment in a process of its own: both ends of the pipe.

The process is a new interpreter that is given the module path and how to make the environment. It imports this file and
with it nothing but gymnasium and the errors, never torch or transformers. It ignores Ctrl-C. Its guard
(:mod:`lightning_agentrl.episodes.descendants`) ends it with all its descendants when the trainer asks for that, or ends
in any way, and ends the descendants when the environment's process ends by itself.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from lightning_agentrl.episodes.contract import CONTRACT, Contract, contract_error
from lightning_agentrl.episodes.environment import Answer, AsEnvErrors, Environment
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError, Problem, one_line

T = TypeVar("T")

CLOSING_SECONDS = 5.0  # that an environment has to close
_LOOK_SECONDS = 1.0  # between two checks that the process is alive, since its own children may hold the pipe open
_SERVE = """
import sys
sys.path[:] = {path!r}
from lightning_agentrl.episodes.descendants import guard_descendants
guard_descendants()
from lightning_agentrl.episodes.env_process import serve
serve({pipe})
"""


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the trainer."""

    kind: str
    message: str
    trace: str = ""
    problem: Problem | None = None  # of the configuration

    @property
    def error(self) -> EnvError | ConfigError:
        return ConfigError(self.problem) if self.problem else EnvError(self.kind, self.message, self.trace)


class ProcessEnvironment:
    """The trainer's end of the pipe. The process starts at once; the first call waits for the environment.

    Args:
        recipe: how the environment is made.
        timeout: most seconds that making it, ``reset``, ``step`` and drawing may each take; None: no limit. Imports do
            not count.

    Raises:
        ConfigError: the recipe cannot be read in another process.
        EnvError: no process can be started.
    """

    def __init__(self, recipe: Recipe, timeout: float | None = None) -> None:
        order = _portable(recipe)
        self._recipe, self._timeout = recipe, timeout
        self._contract: Contract | None = None
        self._waiting = False  # for an answer
        self._closing_since: float | None = None
        try:
            self._start(order)
        except OSError as error:  # the machine has no process or no file left
            raise EnvError("start", f"the environment's process cannot be started: {_named(error)}") from None

    def _start(self, order: bytes) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _SERVE.format(path=sys.path, pipe=theirs.fileno())],
                stdin=subprocess.PIPE,  # closed with this object, or by the kernel when we end; then the guard acts
                pass_fds=(theirs.fileno(),),
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"},
                process_group=0,  # Ctrl-C does not reach it
            )
        finally:
            theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send_bytes(order)

    @property
    def contract(self) -> Contract:
        """What the environment offers before its first episode; waits until it is made."""
        if self._contract is None:
            self._receive("import", None)
            self._contract = self._receive("make", self._timeout)
        return self._contract

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

    def _begin_close(self) -> None:
        """Ask the environment to close, unless it is busy."""
        if self._contract is not None and not self._waiting and not self._pipe.closed:
            self._closing_since = time.monotonic()
            self._waiting = True
            with suppress(OSError):  # the process is gone, which `close` reports
                self._pipe.send(("close", ()))

    def close(self) -> None:
        """Close the environment, then end the process. A busy one is ended at once."""
        self._begin_close()
        try:
            if self._closing_since is not None and not self._pipe.closed:
                self._receive("close", CLOSING_SECONDS, self._closing_since)
                ends_by = self._closing_since + 2 * CLOSING_SECONDS
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(ends_by - time.monotonic(), 0.0))
        finally:
            self.end()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._pipe.close()

    def end(self) -> None:
        """End the process with its descendants, if it runs. A call that waits for it fails."""
        if self._process.returncode is None:  # not reaped yet, so the process id is still its own
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)  # the guard, which no environment can hold up

    def _ask(self, call: str, *args: Any) -> Any:
        assert self.contract is not None
        with suppress(OSError):  # the process is gone, which is reported below
            self._pipe.send((call, args))
        return self._receive(call, self._timeout)

    def _receive(self, call: str, limit: float | None, since: float | None = None) -> Any:
        """Wait for an answer and return it.

        Args:
            call: that is answered.
            limit: seconds that it may take; None: any number.
            since: when it began, by the monotonic clock; None: now.

        Raises:
            EnvError: what the environment raised; ``died``: its process has ended; ``timeout``: it was ended here.
            ConfigError: the environment cannot be made.
        """
        self._waiting = True
        try:
            if not self._comes(limit, time.monotonic() if since is None else since):
                self.end()
                if call == "close":
                    raise EnvError("timeout", f"the environment's close took longer than {limit:g} s")
                raise EnvError(
                    "timeout",
                    f"the environment's {call} took longer than {limit:g} s, the most that "
                    f"{self._recipe.key}.timeout_seconds allows",
                )
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise EnvError("died", f"the environment's process ended in {call} {self._how_it_ended()}") from None
        self._waiting = False
        try:
            result = pickle.loads(answer)
        except Exception as error:  # noqa: BLE001 - its classes may not exist in this process
            raise contract_error(
                f"what the environment gave in {call} cannot be read in the trainer ({_named(error)}); give plain "
                "values"
            ) from None
        if isinstance(result, _Failure):
            raise result.error
        return result

    def _comes(self, limit: float | None, since: float) -> bool:
        """Wait for an answer or the end of the process until ``limit`` seconds are over; return whether one is there.

        Raises:
            EOFError: the process has ended without an answer.
        """
        end = None if limit is None else since + limit
        while True:
            left = _LOOK_SECONDS if end is None else max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))
            if self._pipe.poll(left):
                return True
            if self._ended:
                if self._pipe.poll(0):
                    return True
                raise EOFError
            if end is not None and time.monotonic() >= end:
                return False

    @property
    def _ended(self) -> bool:
        """Whether the process has ended; does not reap it, so that its id stays its own."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _how_it_ended(self) -> str:
        self.end()
        code = self._process.wait()
        return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"


def _portable(recipe: Recipe) -> bytes:
    """Return the pickled recipe for another process, with what this one has registered.

    Raises:
        ConfigError: it cannot be sent, or only the started script has registered it.
    """
    fix = f"or set {recipe.key}.worker to thread"
    spec = None if ":" in recipe.id else recipe.spec
    entry = None if spec is None else spec.entry_point
    home = entry.split(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
    if home == "__main__":
        raise ConfigError(
            f"the environment '{recipe.id}' is registered in the script that was started, which is not run in its "
            f"process (key {recipe.key}.id); move it to a module and write module:{recipe.id}, {fix}"
        )
    try:
        order = pickle.dumps(replace(recipe, registered=spec))
    except Exception as error:  # whatever the arguments raise
        raise ConfigError(_not_portable(recipe.id, recipe.key, _named(error))) from error
    return pickle.dumps((recipe.id, recipe.key, order))


def _not_portable(env_id: str, key: str, why: str) -> Problem:
    return Problem(
        f"the arguments of the environment '{env_id}' cannot be sent to its process: {why} (key {key}.kwargs); give "
        f"plain values, or objects of importable classes, or set {key}.worker to thread"
    )


def serve(pipe: int) -> None:
    """Run the calls of the trainer, at the process's end of the pipe. Takes the number of an open file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer is gone
        _serve(Connection(pipe))


def _serve(pipe: Connection) -> None:
    env_id, key, order = pickle.loads(pipe.recv_bytes())
    recipe = _tried(lambda: _loaded(env_id, key, order))
    _send(pipe, recipe if isinstance(recipe, _Failure) else None)
    if isinstance(recipe, _Failure):
        return
    _seed_globals(0)
    environment = _tried(lambda: Environment(recipe.make, alone=True))
    _send(pipe, environment if isinstance(environment, _Failure) else environment.contract)
    call = "close" if isinstance(environment, _Failure) else ""
    while call != "close":
        call, args = pipe.recv()
        if call in ("reset", "renew"):
            _seed_globals(*args)
        _send(pipe, _tried(partial(getattr(environment, call), *args)))


def _loaded(env_id: str, key: str, order: bytes) -> Recipe:
    try:
        recipe = pickle.loads(order)
    except Exception as error:  # whatever modules of the arguments raise
        raise ConfigError(_not_portable(env_id, key, _named(error))) from error
    with AsEnvErrors():
        recipe.load()
    return recipe


def _seed_globals(seed: int) -> None:
    """Seed the global generators, so that games that draw from them repeat an episode too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _tried(ask: Callable[[], T]) -> T | _Failure:
    try:
        return ask()
    except EnvError as error:
        return _Failure(error.kind, str(error), error.trace)
    except ConfigError as error:
        return _Failure("", str(error), problem=error.problem)


def _send(pipe: Connection, result: Any) -> None:
    try:
        data = pickle.dumps(result)
    except Exception as error:  # noqa: BLE001 - whatever the environment has put into its info
        what = _unsendable(result.info) if isinstance(result, Answer) else ""
        sentence = f"what the environment gave{what} cannot be sent to the trainer ({_named(error)}); give plain values"
        data = pickle.dumps(_Failure(CONTRACT, sentence))
    pipe.send_bytes(data)


def _unsendable(info: Mapping[str, Any]) -> str:
    """Return a phrase that names the first entry that cannot be pickled; empty if all can."""
    for name, value in info.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - as above
            return f" as info[{name!r}]"
    return ""


def _named(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")
