"""Where an environment lives: four async calls, and behind them its construction, retries and replays.

Its calls run in a thread, in the event loop if it declares that its steps take microseconds, or in a process of its own
(:mod:`lightning_agentrl.episodes.env_process`). Any error in it is raised as an
:class:`~lightning_agentrl.errors.faults.EnvError` with the place where it happened.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lightning_agentrl.episodes.contract import CONTRACT, Contract
from lightning_agentrl.episodes.environment import Answer, Hosted
from lightning_agentrl.episodes.wording import Wording, check_wording, reworded
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError

CLOSING_SECONDS = 30.0  # that a run waits for the close of an environment
T = TypeVar("T")


class ReplayDiffersError(EnvError):
    """An environment that does not reach the same observation from the same seed and actions."""

    def __init__(self, message: str) -> None:
        super().__init__("replay", message)


@dataclass(frozen=True)
class Start:
    """Where an episode begins."""

    env: int  # number of the environment
    episode: int
    seed: int


class EnvWorker:
    """One environment, its running episode as seed and actions, and its recovery from errors.

    Args:
        make: makes the environment, at once and again after an error. A process starts in the background.
        executor: runs the blocking calls; None: they run in the event loop.
        retries: see :class:`EnvConfig`.
        wording: what the config changes in the words of the environment.
        wording_key: its key in the config.
        name: of the environment, for warnings.
    """

    def __init__(
        self,
        make: Callable[[], Hosted],
        executor: Executor | None = None,
        retries: int = 0,
        wording: Wording | None = None,
        wording_key: str = "",
        name: str = "an environment",
    ) -> None:
        self.executor = executor
        self.retries = retries
        self.wording = wording
        self.wording_key = wording_key
        self.name = name
        self.call = ""  # what the environment is doing: reset, step, render, or nothing
        self.moved_at = 0.0  # when that changed, on the monotonic clock
        self.start: Start | None = None  # of the running episode
        self.actions: list[str] = []  # of this episode
        self.answer: Answer | None = None
        self.errors: list[str] = []  # kinds of those that were recovered from and are in no turn yet
        self.lost_seeds: set[int] = set()  # of episodes that ended in faults since the last turn that was recorded
        self._make = make
        self._environment = _made_or_not(make)
        self._forked: tuple[int, int] | None = None  # after so many actions of the episode, and the seed from there on
        self._given_up = False  # the running call was cancelled
        self._closing: Future[None] | None = None
        self._closes_by = 0.0  # on the monotonic clock
        self._astray = False  # the environment may be further than the recorded actions

    @property
    def contract(self) -> Contract:
        """What the environment offers now; before its first episode, as far as it is known."""
        return self._environment.contract if self.answer is None else self.answer.contract

    # What an interaction waits for

    async def reset(self, start: Start) -> Answer:
        """Begin an episode and return its first answer."""
        self._forked = None
        with NotingWhere(start):
            answer = await self._run("reset", lambda: self._reset(start))
            self._count_mended(answer)
            return self._begun(start, (), answer)

    async def step(self, action: str) -> Answer:
        """Take one action and return the answer."""
        with NotingWhere(self._started, self.actions, action):
            answer = await self._run("step", lambda: self._again(lambda: self._environment.step(action), action))
            self.answer = self._reworded(answer)
            self.actions.append(action)
            self._count_mended(self.answer)
            return self.answer

    async def draw(self) -> bytes:
        """Return a PNG of the environment as it is."""
        with NotingWhere(self._started, self.actions, "render"):
            # after an error it is that of the environment made anew
            return await self._run("render", lambda: self._again(lambda: self._environment.draw(), "render"))

    async def fork(self, start: Start, actions: Sequence[str], fingerprint: str, seed: int) -> Answer:
        """Replay an episode up to some moment, and let the environment draw from another seed from there on.

        Args:
            start: of the episode.
            actions: those taken until then.
            fingerprint: of the observation that they led to.
            seed: of what is drawn from then on.

        Raises:
            ReplayDiffersError: they lead to another observation.
        """
        self._forked = len(actions), seed
        replayed = partial(self._replayed, start, actions, fingerprint)
        with NotingWhere(start):
            return self._begun(start, actions, await self._run("fork", lambda: self._again(replayed, None, start)))

    async def drew(self) -> bool:
        """Return whether the environment has drawn random numbers since it was forked."""
        return await self._run("fork", lambda: self._environment.drew())

    async def aclose(self) -> None:
        """Close the environment."""
        await self._run("close", self.close)

    # The same without an event loop

    def reset_now(self, start: Start) -> Answer:
        """Begin an episode and return its first answer; so environments are checked before a run.

        An answer of a wrong form is not asked for again.

        Raises:
            ConfigError: the words of the config do not fit the environment's.
        """
        self._forked = None
        with NotingWhere(start):
            answer = self._reset(start, checks=True)
            if self.wording is not None:
                check_wording(answer.contract, self.wording, self.wording_key)
            return self._begun(start, (), answer)

    def replay_now(self, start: Start, actions: Sequence[str], fingerprint: str) -> Answer:
        """Begin an episode, replay its actions and return the last answer.

        Args:
            start: of the episode.
            actions: those taken in it.
            fingerprint: of the observation that they led to.

        Raises:
            ReplayDiffersError: they lead to another observation.
        """
        self._forked = None
        with NotingWhere(start):
            replayed = partial(self._replayed, start, actions, fingerprint)
            return self._begun(start, actions, self._again(replayed, None, start))

    def wait(self) -> None:
        """Wait until the environment is made."""
        assert self._environment.contract is not None

    def close(self) -> None:
        """Close the environment. An error of it is only a warning, and so is a close that does not return in time."""
        self.begin_close()
        closing, self._closing = self._closing, None
        try:
            if closing is None:
                self._environment.close()
            else:
                closing.result(max(self._closes_by - time.monotonic(), 0.0))
        except TimeoutError:
            warnings.warn(
                f"the close of {self.name} has not returned within {CLOSING_SECONDS:g} s; the run goes on without it",
                stacklevel=2,
            )
        except EnvError as error:
            warnings.warn(f"{error} (while it was closed)", stacklevel=2)

    def begin_close(self) -> None:
        """Let an environment whose calls may block close in a separate thread; :meth:`close` waits for it."""
        if self.executor is not None and self._closing is None:
            self._closing, self._closes_by = Future(), time.monotonic() + CLOSING_SECONDS
            threading.Thread(target=self._close_into, args=(self._closing,), name="close", daemon=True).start()

    def _close_into(self, closing: Future[None]) -> None:
        try:
            self._environment.close()
            closing.set_result(None)
        except EnvError as error:
            closing.set_exception(error)

    def take_errors(self) -> tuple[str, ...]:
        """Return the kinds of errors that were recovered from since the last call."""
        errors, self.errors = tuple(self.errors), []
        return errors

    @property
    def _started(self) -> Start:
        assert self.start is not None, "reset comes first"
        return self.start

    def _begun(self, start: Start, actions: Sequence[str], answer: Answer) -> Answer:
        self.start, self.actions, self.answer = start, list(actions), self._reworded(answer)
        return self.answer

    def _reworded(self, answer: Answer) -> Answer:
        if self.wording is None:
            return answer
        return replace(answer, contract=reworded(answer.contract, self.wording))

    def _count_mended(self, answer: Answer) -> None:
        if answer.mended:
            self.errors.append("surrogates")  # mended without a retry

    async def _run(self, call: str, blocking: Callable[[], T]) -> T:
        """Run a call where the environment lives; return its result. A cancelled one is ended if possible."""
        self.call, self.moved_at, self._given_up = call, time.monotonic(), False
        try:
            if self.executor is None:
                return blocking()
            return await asyncio.get_running_loop().run_in_executor(self.executor, blocking)
        except asyncio.CancelledError:
            self._given_up = self._astray = True
            self._environment.end()
            raise
        finally:
            self.call, self.moved_at = "", time.monotonic()

    # Blocking, where the environment lives

    def _reset(self, start: Start, checks: bool = False) -> Answer:
        return self._again(lambda: self._environment.reset(start.seed), None, start, checks)

    def _again(self, ask: Callable[[], T], action: str | None, start: Start | None = None, checks: bool = False) -> T:
        """Call the environment; after an error make it again, replay the episode and repeat the call.

        Args:
            ask: the call.
            action: what the call does; None for one that begins an episode.
            start: of the episode that the call begins.
            checks: whether an answer of a wrong form is wrong input, and not an error that may pass.

        Returns:
            What the call returned.

        Raises:
            EnvError: it failed once more than ``retries``, or cannot be repeated.
            ConfigError: the environment could never be made.
        """
        last: Exception | None = None
        made_before, overcome = self._astray, len(self.errors)
        for attempt in itertools.count():
            try:
                if attempt or self._astray:
                    self._make_anew()
                    if action is not None:
                        assert self.answer is not None
                        self._replayed(self._started, self.actions, self.answer.fingerprint)
                return ask()
            except ReplayDiffersError as error:
                self._astray = True
                del self.errors[overcome:]
                raise error from last  # its state is unknown, so the episode cannot continue
            except (EnvError, ConfigError) as error:
                if isinstance(error, ConfigError) and not (attempt or made_before):
                    raise
                fault = error if isinstance(error, EnvError) else EnvError("make", str(error))
                wrong_input = checks and fault.kind == CONTRACT
                repeats = action is None or self.contract.deterministic
                self._astray = True
                if wrong_input or attempt >= self.retries or self._given_up or not repeats:
                    del self.errors[overcome:]
                    raise fault from (None if fault is error else error)
                last = fault
                self.errors.append(fault.kind)
                where = _where(start or self._started, () if start else self.actions, action)
                warn_each(f"{fault} ({where}); trying again")
        raise AssertionError

    def _make_anew(self) -> None:
        with suppress(EnvError):  # it is broken already
            self._environment.close()
        self._environment = self._make()
        self._astray = False
        if self._given_up:  # meanwhile
            self._environment.end()

    def _replayed(self, start: Start, actions: Sequence[str], fingerprint: str) -> Answer:
        """Replay an episode from its start and return the last answer.

        Raises:
            ReplayDiffersError: it does not lead to the observation of this fingerprint, since the environment draws
                randomness from elsewhere than its seed, or says so.
        """
        if not self.contract.deterministic:
            raise ReplayDiffersError(f"environment {start.env} declares that it cannot repeat an episode")
        answer, (forked_at, seed) = self._environment.reset(start.seed), self._forked or (None, 0)
        for taken, action in enumerate((*actions, None)):
            if taken == forked_at:
                self._environment.renew(seed)
            if action is not None:
                answer = self._environment.step(action)
        if fingerprint != answer.fingerprint:
            raise ReplayDiffersError(
                f"environment {start.env} does not repeat its episode from seed and actions, so it cannot be resumed; "
                "draw all its randomness from self.np_random, or declare the attribute `deterministic` as false"
            )
        return answer


def close_all(workers: Sequence[EnvWorker]) -> None:
    """Close environments, those whose calls may block beside each other."""
    for worker in workers:
        worker.begin_close()
    for worker in workers:
        worker.close()


class _Unmade:
    """Stands for an environment that could not be made; whatever asks for it learns why, and it is made anew."""

    def __init__(self, error: EnvError) -> None:
        self.error = error

    @property
    def contract(self) -> Contract:
        raise self.error

    def reset(self, seed: int) -> Answer:
        raise self.error

    def step(self, action: str) -> Answer:
        raise self.error

    def draw(self) -> bytes:
        raise self.error

    def renew(self, seed: int) -> None:
        raise self.error

    def drew(self) -> bool:
        raise self.error

    def close(self) -> None:
        """Do nothing: there is none."""

    def end(self) -> None:
        """Do nothing: there is none."""


def _made_or_not(make: Callable[[], Hosted]) -> Hosted:
    try:
        return make()
    except EnvError as error:
        return _Unmade(error)


def warn_each(text: str) -> None:
    """Warn of one error. Python keeps no list of what was said, which would grow for as long as a run lasts."""
    warnings.warn_explicit(text, UserWarning, __name__, 0)


class NotingWhere:
    """A context that notes in an error where it came from."""

    def __init__(self, start: Start, actions: Sequence[str] = (), action: str | None = None) -> None:
        self.place = start, actions, action

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            error.add_note(_where(*self.place))


def _where(start: Start, actions: Sequence[str], action: str | None) -> str:
    doing = "in its reset" if action is None else f"in turn {len(actions)}, action {action!r}"
    return f"environment {start.env}, episode {start.episode} with seed {start.seed}, {doing}"
