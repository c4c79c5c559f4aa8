"""Probe: an instance of an environment whose calls have time limits and whose answers are checked."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from lightning_agentrl.episodes.contract import Contract, ContractReader
from lightning_agentrl.episodes.environment import AsEnvErrors
from lightning_agentrl.episodes.observation import Observed, fingerprint_of, read_observation
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.tools.check_env.findings import Log
from lightning_agentrl.tools.check_env.seen import (
    Play,
    Seen,
    check_info,
    check_pickles,
    check_texts,
    checked_ends,
    checked_reward,
    form,
    looks,
)
from lightning_agentrl.tools.check_env.texts import expression


class HangError(BaseException):
    """A call has exceeded its time limit. This class is a BaseException, so that environments do not catch it."""


class ProcessorWait:
    """Seconds that a process has waited for a CPU, as counted by Linux; 0 on other systems."""

    def __init__(self, process: int | str = "self") -> None:
        self._path = f"/proc/{process}/schedstat"
        self._file: IO[str] | None = None
        self._known = True

    def __call__(self) -> float:
        try:
            if self._file is None and self._known:
                self._file = open(self._path, encoding="ascii")  # noqa: SIM115 - the file stays open for all calls
            if self._file is not None:
                self._file.seek(0)
                return int(self._file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            self._file, self._known = None, False
        return 0.0


_waiting = ProcessorWait()


def now() -> float:
    """Return the time in seconds, without the time that this process has waited for a CPU."""
    return time.perf_counter() - _waiting()


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise a HangError in the main thread after this time, and once a second after the first.

    Call `listen_to_alarms` before.
    """
    _Alarm.end = now() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Alarm:
    end = 0.0


def listen_to_alarms() -> None:
    """Install the signal handler for `alarm`, which interrupts calls of environments."""

    def ring(number: int, frame: Any) -> None:
        if now() >= _Alarm.end:
            raise HangError

    signal.signal(signal.SIGALRM, ring)


@dataclass
class Clock:
    """Clock of the exam. Creation, resets and calls that hang do not count against the limit."""

    limit: float
    started: float = field(default_factory=now)
    times: dict[str, list[float]] = field(default_factory=lambda: {"make": [], "reset": [], "step": []})

    def spent(self) -> float:
        """Return the seconds that count against the limit."""
        return now() - self.started - sum(sum(self.times.get(kind, ())) for kind in ("make", "reset", "hang"))

    def until(self, share: float) -> _Until:
        """Return a function that returns whether a share of the limit, from now on, or the total limit is used up."""
        return _Until(self, min(self.spent() + share * self.limit, self.limit))


@dataclass(frozen=True)
class _Until:
    clock: Clock
    end: float

    def __call__(self) -> bool:
        return self.clock.spent() > self.end


T = TypeVar("T")

TURNS = 220  # largest number of turns of an episode
MAKE_SECONDS, RESET_SECONDS, STEP_SECONDS = 60.0, 20.0, 5.0
# Number of first calls of an instance after which generators and infos are compared, since comparing is slow.
_WATCHED_CALLS = 400
_PICKLED_CALLS = 20  # number of first calls whose infos are pickled


class BrokenError(Exception):
    """An instance can no longer be used; the log has the reason."""


class Probe:
    """An instance of an environment, which is created on first use, and again after a failure.

    Args:
        recipe: recipe of the environment.
        log: log for findings.
        clock: clock that records times.
        most_tokens: largest number of tokens of a prompt.
        journal: file for the seed and actions of the current episode, in case the process dies.
    """

    def __init__(
        self, recipe: Recipe, log: Log, clock: Clock, most_tokens: int, journal: IO[str] | None = None
    ) -> None:
        self.recipe, self.log, self.clock, self.most_tokens = recipe, log, clock, most_tokens
        self._journal = journal
        self.env: gymnasium.Env | None = None
        self.seed: int | None = None
        self.actions: list[str] = []
        self.last: Seen | None = None
        self.raises_as = "raises"
        """The check to which an error of this instance is added."""
        self.makes_as = "contract.make"
        """The check to which a failure of its creation is added."""
        # Info of the last answer, and its repr at that time.
        self._kept: tuple[Mapping[str, Any], str | None] | None = None
        self._calls = 0
        self._reader = ContractReader()
        self._looked_at: set[tuple[str, str | bool]] = set()

    def made(self) -> gymnasium.Env:
        """Return the instance, after creating it if needed."""
        if self.env is None:
            self.env = self.call("its creation", "make", lambda: self.recipe.make(), MAKE_SECONDS, self.makes_as)
        return self.env

    def unwrapped(self) -> Any:
        return self.made().unwrapped

    def reset(self, seed: int) -> Seen:
        """Begin the episode with a seed.

        Raises:
            BrokenError: the environment failed; the log has the reason.
        """
        env = self.made()
        self.seed, self.actions, self.last, self._kept = seed, [], None, None
        if self._journal is not None:
            self._journal.seek(0)
            self._journal.truncate()
            self._write(str(seed))
        answer: Any = self.call("reset", "reset", lambda: env.reset(seed=seed), RESET_SECONDS)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._broken("contract.reset", f"reset returned {form(answer)} instead of (observation, info)")
        return self._look(*answer)

    def step(self, action: str) -> Seen:
        """Send one action text.

        Raises:
            BrokenError: as in `reset`.
        """
        env = self.made()
        self.actions.append(action)
        self._write(expression(action))
        answer: Any = self.call("step", "step", lambda: env.step(action), STEP_SECONDS)
        if not isinstance(answer, tuple) or len(answer) != 5:
            five = "(observation, reward, terminated, truncated, info)"
            raise self._broken("contract.step", f"step returned {form(answer)} instead of {five}")
        observation, reward, terminated, truncated, info = answer
        self._compare_kept()
        earned, at_limit = checked_reward(reward, self._note), len(self.actions) == time_limit(env)
        return self._look(observation, info, earned, *checked_ends(terminated, truncated, at_limit, self._note))

    def play(self, seed: int, policy: str, choose: Callable[[list[Seen]], str], turns: int = TURNS) -> Play:
        """Play an episode until it ends, fails, or has ``turns`` turns.

        Args:
            seed: seed of the episode.
            policy: name of the policy.
            choose: function that returns the next action for the answers so far.
            turns: largest number of turns.
        """
        episode = Play(seed, policy)
        try:
            episode.seen.append(self.reset(seed))
            episode.actions = self.actions
            while not episode.over and len(episode.actions) < turns:
                episode.seen.append(self.step(choose(episode.seen)))
        except BrokenError:
            episode.broken = True
            self.drop()
        episode.actions = list(self.actions)
        return episode

    def _write(self, line: str) -> None:
        if self._journal is not None:
            self._journal.write(f"{line}\n")
            self._journal.flush()

    def drop(self) -> None:
        """Close the instance if possible, and remove it."""
        env, self.env = self.env, None
        if env is not None:
            with suppress(BrokenError):
                self.call("close", "close", env.close, STEP_SECONDS, check="contract.close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def call(self, what: str, kind: str, function: Callable[[], T], seconds: float, check: str = "") -> T:
        """Call the environment with a time limit and checks.

        Args:
            what: name of the call, for findings.
            kind: kind of the call, for the clock.
            function: function that makes the call.
            seconds: time limit.
            check: check to which an error is added. Default: ``raises_as``.

        Raises:
            BrokenError: the call raised an error or exceeded the time limit.
        """
        self._calls += kind in ("reset", "step")
        watched = self._calls <= _WATCHED_CALLS and kind in ("reset", "step", "solver") and "rng.global" not in self.log
        before = _generators() if watched else None
        started = now()
        try:
            with AsEnvErrors(), alarm(seconds):
                return self.run(function)
        except EnvError as error:
            if error.kind == HangError.__name__:
                late, kind = kind, "hang"
                if late == "solver":  # a slow player is not a fault of the environment
                    self.log.cut["scripted player"] = f"it did not answer within {seconds:g} seconds"
                    raise BrokenError(what) from error
                raise self._broken("hang", f"{what} did not return within {seconds:g} seconds") from error
            said = str(error).replace("the environment raised", f"{what} raised")
            raise self._broken(check or self.raises_as, said) from error
        except ConfigError as error:
            if len(self.clock.times["make"]) == 0:
                raise  # raised for wrong input of the user
            raise self._broken(check, f"creating it again failed: {error}") from error
        finally:
            self.clock.times.setdefault(kind, []).append(now() - started)
            if before is not None and before != _generators():
                self._note("rng.global", f"{what} changes the state of a global generator (random or numpy.random)")

    def run(self, function: Callable[[], T]) -> T:
        """Run a call of the environment, in this thread."""
        return function()

    def _broken(self, check: str, said: str) -> BrokenError:
        self._note(check, said)
        return BrokenError(said)

    def _note(self, check: str, said: str) -> None:
        self.log.add(check, said, self.seed, self.actions)

    def _look(
        self, raw: Any, info: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Seen:
        try:
            observed = read_observation(raw)
        except EnvError as error:
            self._note("text.type", str(error))
            observed = Observed(type(raw).__name__)
        if not isinstance(info, dict):
            self._note("contract.info", f"info is {form(info)}, not a dictionary")
            info = {}
        own_info = dict(info)
        check_info(own_info, observed.text, self._note)
        if self._calls <= _PICKLED_CALLS:
            check_pickles(own_info, self._note)
        contract = self._contract()
        state = fingerprint_of(observed.text, observed.images)
        kept = raw if self._calls <= 1 else None
        seen = Seen(observed.text, contract, own_info, reward, terminated, truncated, state, kept, observed.mended)
        self._texts(seen)
        self._kept = (info, looks(info)) if self._calls <= _WATCHED_CALLS else None
        self.last = seen
        return seen

    def _contract(self) -> Contract:
        """Return the current contract of the environment, or the previous contract if reading fails."""
        env = self.made()
        try:
            with AsEnvErrors(), alarm(STEP_SECONDS):
                return self.run(lambda: self._reader.read(env))
        except EnvError as error:
            self._note("contract.attribute", str(error))
        return self._reader.contract

    def _texts(self, seen: Seen) -> None:
        said = self.actions[-1] if self.actions else ""
        read = seen.prompt, len(said) > 9 and said  # short replies do not count as echoes
        if read not in self._looked_at:
            self._looked_at.add(read)
            check_texts(seen, self.last, said, self.most_tokens, self.log, self._note)

    def _compare_kept(self) -> None:
        if self._kept is not None and looks(self._kept[0]) != self._kept[1]:
            self._note("info.shared", "a step has changed the info of an earlier turn")


class ThreadedProbe(Probe):
    """Probe whose calls alternate between two threads, neither of them the main thread, as in training."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.raises_as = self.makes_as = "replay.thread"
        self._threads = [ThreadPoolExecutor(1) for _ in range(2)]

    def run(self, function: Callable[[], T]) -> T:
        self._threads.reverse()
        return self._threads[0].submit(function).result()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for thread in self._threads:
            thread.shutdown(wait="hang" not in self.log)


def time_limit(env: gymnasium.Env) -> int | None:
    """Return the number of turns after which gymnasium's TimeLimit truncates; None without this wrapper."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            return env._max_episode_steps
        env = env.env
    return None


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest
