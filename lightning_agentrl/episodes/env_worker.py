"""One environment of a run: where it runs, its episode, and the retries and replays after an error.

Blocking calls run in a thread, in the event loop if the environment declares that its steps take microseconds, or in a
separate process (:mod:`lightning_agentrl.episodes.env_process`). Any error in the environment is raised as an
:class:`~lightning_agentrl.errors.faults.EnvError` with a note about episode and turn.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeGuard, TypeVar

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.env_process import ProcessEnvironment, pickled
from lightning_agentrl.episodes.environment import Answer, Environment
from lightning_agentrl.episodes.observation import CONTRACT
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.episodes.wording import Wording, check_wording, reworded
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError

CLOSING_SECONDS = 30.0  # that a run waits for environments to close
Hosted = Environment | ProcessEnvironment
T = TypeVar("T")


class ReplayDiffersError(EnvError):
    """A replay from the same seed and actions reached another observation.

    Args:
        message: one sentence.
        declared: the environment declares that it is not deterministic.
        call: that an agent program makes instead of the recorded one; None: it is no agent program.
        turn: number of that call in its episode.
    """

    def __init__(
        self, message: str, declared: bool = False, call: Mapping[str, Any] | None = None, turn: int = 0
    ) -> None:
        super().__init__("replay", message)
        self.declared, self.call, self.turn = declared, call, turn


@dataclass(frozen=True)
class Start:
    """The first state of an episode."""

    env: int  # number of the environment
    episode: int
    seed: int

    def __str__(self) -> str:
        return f"environment {self.env}, episode {self.episode} with seed {self.seed}"


class EnvWorker:
    """One environment and its running episode as seed and actions.

    After an error the environment is made anew, the episode is replayed, and the call is repeated.

    Args:
        make: makes the environment, at once and again after an error.
        executor: runs the blocking calls; None: they run in the event loop.
        retries: how often one call may fail.
        wording: texts of the config that replace those of the environment.
        wording_key: the key of the wording in the config.
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
        self.executor, self.retries, self.name = executor, retries, name
        self.wording, self.wording_key = wording, wording_key
        self.contract = Contract()  # what the environment offers now
        self.call = ""  # the running call: reset, step, render, fork, close, or none
        self.moved_at = 0.0  # when that changed, on the monotonic clock
        self.start = Start(0, 0, 0)  # of the running episode
        self.actions: list[str] = []  # of the running episode; a session's episode holds the same list
        self.answer: Answer | None = None  # the last one; None before the first episode
        self.errors: list[str] = []  # kinds of those that were recovered from and are in no turn yet
        self.lost_seeds: set[int] = set()  # of episodes that ended in faults since the last turn that was recorded
        self._make = make
        self._environment: Hosted | None = None
        self._stale = True  # the environment is missing, or in another state than the recorded one
        self._forked: tuple[int, int] | None = None  # number of actions before the fork, and the seed after it
        self._action: str | None = None  # the running action; None: the beginning of an episode
        self._one_call = threading.Lock()  # a call that was cancelled may take a while to end
        self._given_up = threading.Event()  # the running call was cancelled
        with suppress(EnvError):  # the first call makes it again, and raises it
            self._environment, self._stale = make(), False

    # What an interaction waits for

    async def reset(self, start: Start, actions: list[str] | None = None) -> Answer:
        """Begin an episode and return its first answer.

        Args:
            start: of the episode.
            actions: the empty list to which each step adds its action; None: a new one.
        """
        self._begin(start, [] if actions is None else actions)
        return self._see(await self._run("reset", partial(self._replayed, None)))

    async def step(self, action: str) -> Answer:
        """Take one action and return the answer."""
        self._action = action
        answer = self._see(await self._run("step", lambda: self._recovered().step(action)))
        self.actions.append(action)
        return answer

    async def draw(self) -> bytes:
        """Return a PNG of the environment as it is."""
        self._action = "render"
        return await self._run("render", lambda: self._recovered().draw())

    async def fork(self, start: Start, actions: list[str], fingerprint: str, seed: int) -> Answer:
        """Replay an episode up to some state, from which the environment draws different random numbers.

        Args:
            start: of the episode.
            actions: those taken until then; each step adds its own.
            fingerprint: of the observation that they led to.
            seed: of the random numbers from then on.

        Raises:
            ReplayDiffersError: they lead to another observation.
        """
        self._begin(start, actions, (len(actions), seed))
        return self._see(await self._run("fork", partial(self._replayed, fingerprint)))

    async def drew(self) -> bool:
        """Return whether the environment has drawn random numbers since it was forked."""
        self._action = "fork"
        return await self._run("fork", lambda: self._recovered().drew())

    async def aclose(self) -> None:
        """Close the environment."""
        await self._run("close", self.close)

    # The same without an event loop

    def wait(self) -> None:
        """Wait until the environment is made, without retries."""
        self._made().wait()

    def reset_now(self, start: Start, actions: list[str] | None = None) -> Answer:
        """Begin an episode as :meth:`reset` does, to check an environment before a run.

        Raises:
            ConfigError: the wording of the config does not fit the environment.
        """
        self._begin(start, [] if actions is None else actions)
        answer = self._attempts(partial(self._replayed, None), checks=True)
        if self.wording is not None:
            check_wording(answer.contract, self.wording, self.wording_key)
        return self._see(answer)

    def replay_now(self, start: Start, actions: list[str], fingerprint: str) -> Answer:
        """Replay an episode and return the last answer; the arguments are those of :meth:`fork`.

        Raises:
            ReplayDiffersError: the actions lead to another observation.
        """
        self._begin(start, actions)
        return self._see(self._attempts(partial(self._replayed, fingerprint)))

    def close(self) -> None:
        """Close the environment, as :func:`close_all` does."""
        close_all([self])

    def take_errors(self) -> tuple[str, ...]:
        """Return the kinds of errors that were recovered from since the last call."""
        errors, self.errors = tuple(self.errors), []
        return errors

    def _begin(self, start: Start, actions: list[str], forked: tuple[int, int] | None = None) -> None:
        self.start, self.actions, self._forked, self._action = start, actions, forked, None

    def _see(self, answer: Answer) -> Answer:
        if self.wording is not None:
            answer = replace(answer, contract=reworded(answer.contract, self.wording))
        if answer.mended:
            self.errors.append("surrogates")
        self.answer, self.contract = answer, answer.contract
        return answer

    async def _run(self, call: str, attempt: Callable[[], T]) -> T:
        """Run a call where the environment lives and return its result. A cancelled call is ended if possible."""
        self.call, self.moved_at, given_up = call, time.monotonic(), threading.Event()
        try:
            if self.executor is None:
                return self._attempts(attempt)
            run = partial(self._attempts, attempt, given_up=given_up)
            return await asyncio.get_running_loop().run_in_executor(self.executor, run)
        except asyncio.CancelledError:
            given_up.set()
            self._stale = True
            if self._environment is not None:
                self._environment.end()
            raise
        finally:
            self.call, self.moved_at = "", time.monotonic()

    # Blocking, in the thread of the executor. No recorded state is set here, since the call may have been cancelled.

    def _attempts(self, attempt: Callable[[], T], checks: bool = False, given_up: threading.Event | None = None) -> T:
        """Call the environment, and again after an error.

        Args:
            attempt: brings the environment to the recorded state and calls it.
            checks: an answer of a wrong form is wrong input, not an error that may pass.
            given_up: set if the call is cancelled.

        Raises:
            EnvError: the call failed once more than ``retries``, or cannot be repeated.
            ConfigError: the environment could never be made.
        """
        with self._one_call:
            self._given_up = given_up or threading.Event()
            last: Exception | None = None
            overcome = len(self.errors)
            for failed in itertools.count():
                try:
                    return attempt()
                except (EnvError, ConfigError) as error:
                    self._stale = True
                    if failed >= self.retries or not self._can_repeat(error, checks):
                        del self.errors[overcome:]
                        error.add_note(self._place)
                        raise error from last or error.__cause__
                    last = error
                    self.errors.append(error.kind)
                    warn_each(f"{error} ({self._place}); trying again")
            raise AssertionError

    def _can_repeat(self, error: EnvError | ConfigError, checks: bool) -> TypeGuard[EnvError]:
        return (
            isinstance(error, EnvError)
            and not isinstance(error, ReplayDiffersError)
            and not (checks and error.kind == CONTRACT)
            and (self._action is None or self.contract.deterministic)
            and not self._given_up.is_set()
        )

    @property
    def _place(self) -> str:
        """The running call, for errors."""
        if self._action is None:
            return f"{self.start}, in its reset"
        return f"{self.start}, in turn {len(self.actions)}, action {self._action!r}"

    def _made(self) -> Hosted:
        """Return the environment, made anew if it is missing or stale."""
        environment = self._environment
        if environment is not None and not self._stale:
            return environment
        if environment is not None:
            with suppress(EnvError):  # it is broken already
                environment.close()
        try:
            environment = self._environment = self._make()
            if self._given_up.is_set():  # meanwhile
                environment.end()
            environment.wait()
        except ConfigError as error:
            if self.answer is not None:  # it could be made before
                raise EnvError("make", str(error)) from error
            raise
        self._stale = False
        return environment

    def _recovered(self) -> Hosted:
        """Return the environment in the recorded state: after an error, made anew and replayed."""
        if self._stale:
            assert self.answer is not None
            self._replayed(self.answer.fingerprint)
        return self._made()

    def _replayed(self, fingerprint: str | None) -> Answer:
        """Replay the running episode from its start and return the last answer.

        Args:
            fingerprint: of the observation that it led to; None: any.

        Raises:
            ReplayDiffersError: it leads to another observation, since the environment draws randomness from elsewhere
                than its seed, or the environment declares that it cannot repeat an episode.
        """
        environment = self._made()
        answer, (forked_at, seed) = environment.reset(self.start.seed), self._forked or (None, 0)
        if fingerprint is not None and not answer.contract.deterministic:
            raise ReplayDiffersError(f"environment {self.start.env} declares that it cannot repeat an episode", True)
        for taken, action in enumerate((*self.actions, None)):
            if taken == forked_at:
                environment.renew(seed)
            if action is not None:
                answer = environment.step(action)
        if fingerprint is not None and answer.fingerprint != fingerprint:
            raise ReplayDiffersError(
                f"environment {self.start.env} does not repeat its episode from seed and actions, so it cannot be "
                "resumed; draw all its randomness from self.np_random, or declare the attribute `deterministic` as "
                "false",
                call=answer.call,
                turn=len(self.actions),
            )
        return answer

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()


class DaemonThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread for each call.

    A call that never returns holds up neither other calls nor the exit of the interpreter, which waits for the threads
    of an ordinary executor.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                    future.set_exception(error)

        threading.Thread(target=work, name="call", daemon=True).start()
        return future


def close_all(workers: Sequence[EnvWorker]) -> None:
    """Close environments in parallel. An error, and a close that does not return in time, is only a warning."""
    closes_by = time.monotonic() + CLOSING_SECONDS
    for worker, closing in [(worker, DaemonThreads().submit(worker._close)) for worker in workers]:
        try:
            closing.result(max(closes_by - time.monotonic(), 0.0))
        except TimeoutError:
            warnings.warn(
                f"the close of {worker.name} has not returned within {CLOSING_SECONDS:g} s; the run goes on without it",
                stacklevel=2,
            )
        except EnvError as error:
            warnings.warn(f"{error} (while it was closed)", stacklevel=2)


def warn_each(text: str) -> None:
    """Warn of one error. Python keeps no list of what was said, which would grow for as long as a run lasts."""
    warnings.warn_explicit(text, UserWarning, __name__, 0)


def make_worker(
    recipe: Recipe,
    executor: Executor | None = None,
    place: Literal["thread", "process"] | None = None,
    timeout: float | None = None,
    retries: int = 0,
    wording: Wording | None = None,
) -> EnvWorker:
    """Return the worker of an environment: inline, in a thread or in a process.

    Args:
        recipe: of the environment.
        executor: runs its calls if it lives in a thread; None: they run in the caller's.
        place: where it lives; None: what the environment declares, else a thread.
        timeout: most seconds of a call (``timeout_seconds``), which needs a process; None: no limit.
        retries: how often a call may fail.
        wording: texts of the config that replace those of the environment.

    Raises:
        ConfigError: it cannot be imported, or cannot run there; with the key to change.
    """
    declared = None if place == "process" else getattr(recipe.load(), "worker", None)
    if declared == "process" and place == "thread":
        raise ConfigError(
            f"the environment '{recipe.id}' needs a separate process (its attribute `worker`); remove the key "
            f"{recipe.key}.worker or set it to process"
        )
    where = place or declared or "thread"
    make: Callable[[], Hosted]
    if where == "process":
        pickled(recipe)  # refuses what cannot be sent, before a run
        make = partial(ProcessEnvironment, recipe, timeout)
    elif timeout is not None:
        raise ConfigError(no_timeout(timeout, recipe.key))
    else:
        make = partial(Environment, recipe.make, texts=recipe.texts)
    executor = None if where == "inline" else executor
    return EnvWorker(make, executor, retries, wording, f"{recipe.key}.wording", recipe.id)


def no_timeout(seconds: float, key: str) -> str:
    """Return a sentence about a timeout that is given to an environment in a thread."""
    return (
        f"{key}.timeout_seconds {seconds:g} needs a process, since a thread cannot be ended; set {key}.worker to "
        "process, or remove timeout_seconds"
    )
