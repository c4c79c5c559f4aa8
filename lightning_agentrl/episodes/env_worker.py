"""Worker that runs one environment in a thread, inline or in a process, with retries and replays after errors.

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

CLOSING_SECONDS = 30.0  # time that a run waits for environments to close
Hosted = Environment | ProcessEnvironment
T = TypeVar("T")


class ReplayDiffersError(EnvError):
    """A replay with the same seed and actions reached another observation.

    Args:
        message: one sentence for the user.
        declared: whether the environment declares itself not deterministic.
        call: call that an agent program makes instead of the recorded call; None for other environments.
        turn: index of the call in its episode.
    """

    def __init__(
        self, message: str, declared: bool = False, call: Mapping[str, Any] | None = None, turn: int = 0
    ) -> None:
        super().__init__("replay", message)
        self.declared, self.call, self.turn = declared, call, turn


@dataclass(frozen=True)
class Start:
    """Environment, episode and seed that determine the first state of an episode."""

    env: int  # index of the environment
    episode: int
    seed: int

    def __str__(self) -> str:
        return f"environment {self.env}, episode {self.episode} with seed {self.seed}"


class EnvWorker:
    """One environment and its running episode as seed and actions.

    After an error the environment is created again, the episode is replayed, and the call is repeated.

    Args:
        make: function that creates the environment, at once and again after errors.
        executor: executor of the blocking calls; None runs the calls in the event loop.
        retries: number of times that one call is repeated after errors.
        wording: texts of the config that replace those of the environment.
        wording_key: config key of the wording, for error messages.
        name: name of the environment, for warnings.
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
        self.contract = Contract()  # current contract of the environment
        self.call = ""  # the running call (reset, step, render, fork or close), or empty
        self.moved_at = 0.0  # time at which `call` last changed, on the monotonic clock
        self.start = Start(0, 0, 0)  # start of the running episode
        self.actions: list[str] = []  # actions of the running episode; the same list as in the session's episode
        self.answer: Answer | None = None  # the last answer; None before the first episode
        self.errors: list[str] = []  # kinds of recovered errors that no turn has recorded yet
        self.lost_seeds: set[int] = set()  # seeds of episodes that ended in faults since the last recorded turn
        self._make = make
        self._environment: Hosted | None = None
        self._stale = True  # whether the environment is missing, or not in the recorded state
        self._forked: tuple[int, int] | None = None  # number of actions before the fork, and the seed after it
        self._action: str | None = None  # the running action; None during a reset
        self._one_call = threading.Lock()  # lets one call run at a time; a canceled call may take a while to end
        self._given_up = threading.Event()  # set if the running call was canceled
        with suppress(EnvError):  # the first call creates the environment again, and raises the error
            self._environment, self._stale = make(), False

    # Asynchronous calls, for interactions

    async def reset(self, start: Start, actions: list[str] | None = None) -> Answer:
        """Begin an episode and return its first answer.

        Args:
            start: environment, episode and seed.
            actions: empty list to which each step appends its action; None means a new list.
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
        """Return a PNG of the environment's current state."""
        self._action = "render"
        return await self._run("render", lambda: self._recovered().draw())

    async def fork(self, start: Start, actions: list[str], fingerprint: str, seed: int) -> Answer:
        """Replay an episode up to a state, and reseed the environment's random generators there.

        Args:
            start: environment, episode and seed.
            actions: actions up to the state; each later step appends its action.
            fingerprint: fingerprint of the observation in that state.
            seed: seed of the random numbers from then on.

        Raises:
            ReplayDiffersError: the actions lead to another observation.
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

    # Blocking calls, outside of an event loop

    def wait(self) -> None:
        """Wait until the environment has been created, without retries."""
        self._made().wait()

    def reset_now(self, start: Start, actions: list[str] | None = None) -> Answer:
        """Begin an episode like :meth:`reset`, to check an environment before a run.

        Raises:
            ConfigError: the wording of the config does not match the environment.
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
        """Run a call in the worker's thread or event loop and return its result; try to end it if it is canceled."""
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

    # Blocking calls in a thread of the executor. They set no recorded state, since the call may have been canceled.

    def _attempts(self, attempt: Callable[[], T], checks: bool = False, given_up: threading.Event | None = None) -> T:
        """Call the environment, with retries after errors.

        Args:
            attempt: function that brings the environment to the recorded state and calls it.
            checks: whether an answer of a wrong form is wrong input, which is not retried.
            given_up: event that is set when the call is canceled.

        Raises:
            EnvError: all retries failed, or the call cannot be repeated.
            ConfigError: the environment cannot be created.
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
        """Description of the running call, for error messages."""
        if self._action is None:
            return f"{self.start}, in its reset"
        return f"{self.start}, in turn {len(self.actions)}, action {self._action!r}"

    def _made(self) -> Hosted:
        """Return the environment, created again if it is missing or stale."""
        environment = self._environment
        if environment is not None and not self._stale:
            return environment
        if environment is not None:
            with suppress(EnvError):  # the environment is already broken
                environment.close()
        try:
            environment = self._environment = self._make()
            if self._given_up.is_set():  # the call was canceled while the environment was created
                environment.end()
            environment.wait()
        except ConfigError as error:
            if self.answer is not None:  # the environment was created before, so the config is right
                raise EnvError("make", str(error)) from error
            raise
        self._stale = False
        return environment

    def _recovered(self) -> Hosted:
        """Return the environment in the recorded state; after an error, create it again and replay the episode."""
        if self._stale:
            assert self.answer is not None
            self._replayed(self.answer.fingerprint)
        return self._made()

    def _replayed(self, fingerprint: str | None) -> Answer:
        """Replay the running episode from its start and return the last answer.

        Args:
            fingerprint: expected fingerprint of the last observation; None accepts any observation.

        Raises:
            ReplayDiffersError: the replay leads to another observation, since the environment does not draw all
                randomness from its seed, or the environment declares itself not deterministic.
        """
        environment = self._made()
        answer, (forked_at, seed) = environment.reset(self.start.seed), self._forked or (None, 0)
        if fingerprint is not None and not answer.contract.deterministic:
            raise ReplayDiffersError(f"environment {self.start.env} declares that it is not deterministic", True)
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
    """Executor that starts a daemon thread for each call.

    A call that never returns blocks neither other calls nor the exit of the interpreter, which waits for the threads
    of ordinary executors.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - the waiting thread raises the error again
                    future.set_exception(error)

        threading.Thread(target=work, name="call", daemon=True).start()
        return future


def close_all(workers: Sequence[EnvWorker]) -> None:
    """Close environments in parallel. Errors and timeouts are only warnings."""
    closes_by = time.monotonic() + CLOSING_SECONDS
    for worker, closing in [(worker, DaemonThreads().submit(worker._close)) for worker in workers]:
        try:
            closing.result(max(closes_by - time.monotonic(), 0.0))
        except TimeoutError:
            warnings.warn(
                f"the close of {worker.name} has not returned within {CLOSING_SECONDS:g} s; the run continues anyway",
                stacklevel=2,
            )
        except EnvError as error:
            warnings.warn(f"{error} (while it was closed)", stacklevel=2)


def warn_each(text: str) -> None:
    """Warn every time, even with equal texts. Python then keeps no record, which would grow without limit."""
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
        recipe: recipe of the environment.
        executor: executor of the environment's calls in a thread; None runs the calls in the caller's thread.
        place: ``thread`` or ``process``. Default: the environment's declaration, or a thread without a declaration.
        timeout: time limit of a call in seconds (``timeout_seconds``), which requires a process; None: no limit.
        retries: number of times that a call is repeated after errors.
        wording: texts of the config that replace those of the environment.

    Raises:
        ConfigError: the environment cannot be imported, or cannot run in this place; the message names the key.
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
        pickled(recipe)  # raises before the run if the recipe cannot be sent
        make = partial(ProcessEnvironment, recipe, timeout)
    elif timeout is not None:
        raise ConfigError(no_timeout(timeout, recipe.key))
    else:
        make = partial(Environment, recipe.make, texts=recipe.texts)
    executor = None if where == "inline" else executor
    return EnvWorker(make, executor, retries, wording, f"{recipe.key}.wording", recipe.id)


def no_timeout(seconds: float, key: str) -> str:
    """Return the message that refuses a timeout for an environment in a thread, since a thread cannot be stopped."""
    return (
        f"{key}.timeout_seconds {seconds:g} needs a process, since a thread cannot be stopped; set {key}.worker to "
        "process, or remove timeout_seconds"
    )
