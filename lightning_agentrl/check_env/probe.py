"""One instance of an environment under watch: every answer is looked at, every call has a time limit."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from lightning_agentrl.check_env.log import Log
from lightning_agentrl.check_env.stopwatch import Clock, HangError, alarm, now
from lightning_agentrl.check_env.texts import CONTROL, MARKERS, expression, mined, shown, tokens
from lightning_agentrl.episodes.contract import (
    INFO_FLAGS,
    INFO_TEXTS,
    LARGEST_REWARD,
    Contract,
    read_contract,
    read_flag,
    read_metrics,
)
from lightning_agentrl.episodes.environment import AsEnvErrors
from lightning_agentrl.episodes.observation import Observed, fingerprint_of, read_observation
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError

T = TypeVar("T")

TURNS = 220  # of an episode at most
LARGEST = 100.0  # reward that is not asked about
MAKE_SECONDS, RESET_SECONDS, STEP_SECONDS = 60.0, 20.0, 5.0
_LONG_REPLY = 1000  # characters
_WATCHED_CALLS = 400  # first calls of an instance round which generators and infos are compared, which takes time
_OFFERED = ("available_actions", "admissible_commands", "valid_actions", "legal_actions", "actions")  # lists in info


class BrokenError(Exception):
    """An instance cannot be used any more; why is in the log."""


@dataclass(frozen=True)
class Seen:
    """What an environment showed after a reset or a step."""

    text: str
    contract: Contract
    info: Mapping[str, Any]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    state: str = ""
    """What tells observations apart: the text, and hashes of images, which would fill the memory."""
    raw: Any = None
    """The observation as it came, a text or a dictionary; only of the first call of an instance."""

    @property
    def prompt(self) -> str:
        """What a policy reads."""
        return f"{self.contract.system_prompt}\n{self.text}"

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def success(self) -> bool | None:
        value = self.info.get("success")
        return None if value is None else bool(value)

    @property
    def invalid(self) -> bool | None:
        """Whether the environment says that the action text named no action; None where it says nothing."""
        value = self.info.get("invalid_action")
        return None if value is None else bool(value)

    def legal(self) -> list[str]:
        """Return replies that a policy may give: named actions, else those in info, else what the text offers."""
        if self.contract.actions:
            return list(self.contract.actions)
        for name in _OFFERED:
            offered = self.info.get(name)
            if isinstance(offered, list | tuple) and offered and all(isinstance(one, str) for one in offered):
                return list(offered)
        return mined(self.prompt)

    def same(self) -> tuple[Any, ...]:
        """Return what must be equal when an episode is played again."""
        texts = tuple(self.info.get(name) for name in INFO_TEXTS[:2])
        offered = self.contract.system_prompt, tuple(self.contract.actions), self.contract.examples
        return self.state, self.reward, self.terminated, self.truncated, *offered, *texts


@dataclass
class Play:
    """One episode as it was played."""

    seed: int
    policy: str
    actions: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    broken: bool = False

    @property
    def over(self) -> bool:
        return bool(self.seen) and self.seen[-1].over

    @property
    def total(self) -> float:
        return sum(one.reward for one in self.seen)

    @property
    def progression(self) -> float:
        """How much of the task the environment calls done at the end; 1 where it says nothing."""
        value = self.seen[-1].info.get("progression") if self.seen else None
        return float(value) if isinstance(value, int | float | np.number) else 1.0


class Probe:
    """An instance, made when it is first needed and again after it broke.

    Args:
        recipe: how it is made.
        log: where findings go.
        clock: where times go.
        most_tokens: of a prompt.
        journal: file that says what is being done, for the case that the process does not survive it.
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
        """The check that an error of this instance belongs to."""
        self.makes_as = "contract.make"
        """The check that a failure to make it belongs to."""
        self._kept: tuple[Mapping[str, Any], str | None] | None = None  # info of the last answer, and how it looked
        self._calls = 0
        self._offer: list[Any] = []
        self._looked_at: set[tuple[str, str | bool]] = set()

    def made(self) -> gymnasium.Env:
        """Return the instance; it is made if there is none."""
        if self.env is None:
            self.env = self.call("making it", "make", lambda: self.recipe.make(), MAKE_SECONDS, self.makes_as)
        return self.env

    def unwrapped(self) -> Any:
        return self.made().unwrapped

    def reset(self, seed: int) -> Seen:
        """Begin the episode of a seed.

        Raises:
            BrokenError: the environment failed; the log says how.
        """
        env = self.made()
        self.seed, self.actions, self.last, self._kept = seed, [], None, None
        if self._journal is not None:
            self._journal.seek(0)
            self._journal.truncate()
            self._write(str(seed))
        answer: Any = self.call("reset", "reset", lambda: env.reset(seed=seed), RESET_SECONDS)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._broken("contract.reset", f"reset gave {_form(answer)} in place of (observation, info)")
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
            form = "(observation, reward, terminated, truncated, info)"
            raise self._broken("contract.step", f"step gave {_form(answer)} in place of {form}")
        observation, reward, terminated, truncated, info = answer
        self._compare_kept()
        return self._look(observation, info, self._reward(reward), *self._ends(terminated, truncated))

    def play(self, seed: int, policy: str, choose: Callable[[list[Seen]], str], turns: int = TURNS) -> Play:
        """Play an episode until it ends, breaks, or has so many turns. ``choose`` gets what was seen so far."""
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
        """Close the instance if that is possible, and forget it."""
        env, self.env = self.env, None
        if env is not None:
            with suppress(BrokenError):
                self.call("close", "close", env.close, STEP_SECONDS, check="contract.close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def call(self, what: str, kind: str, function: Callable[[], T], seconds: float, check: str = "") -> T:
        """Call the environment under watch.

        Raises:
            BrokenError: it raised or did not come back.
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
                if late == "solver":  # it may search for as long as it likes, but not here
                    self.log.cut["scripted player"] = f"it did not answer within {seconds:g} seconds"
                    raise BrokenError(what) from error
                raise self._broken("hang", f"{what} did not come back within {seconds:g} seconds") from error
            said = str(error).replace("the environment raised", f"{what} raised")
            raise self._broken(check or self.raises_as, said) from error
        except ConfigError as error:
            if len(self.clock.times["make"]) == 0:
                raise  # wrong input of the user
            raise self._broken(check, f"making it once more failed: {error}") from error
        finally:
            self.clock.times.setdefault(kind, []).append(now() - started)
            if before is not None and before != _generators():
                self._note("rng.global", f"{what} changes the state of a global generator (random or numpy.random)")

    def run(self, function: Callable[[], T]) -> T:
        """Run a call of the environment: here, as in a process of its own."""
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
            self._note("contract.info", f"info is {_form(info)}, not a dictionary")
            info = {}
        own_info = dict(info)
        self._info(own_info, observed.text)
        contract = self._contract()
        state = fingerprint_of(observed.text, observed.images)
        kept = raw if self._calls <= 1 else None
        seen = Seen(observed.text, contract, own_info, reward, terminated, truncated, state, kept)
        self._texts(seen)
        self._kept = (info, _looks(info)) if self._calls <= _WATCHED_CALLS else None
        self.last = seen
        return seen

    def _contract(self) -> Contract:
        """Return what is offered now: all is read after a reset, and when actions or rules have changed."""
        env, last = self.made(), self.last

        def read() -> Contract:
            offer = _offered(env)
            if last is not None and offer == self._offer:
                return last.contract
            self._offer = offer
            return read_contract(env, begun=True)

        try:
            with AsEnvErrors(), alarm(STEP_SECONDS):
                return self.run(read)
        except EnvError as error:
            self._note("contract.attribute", str(error))
        return last.contract if last else Contract()

    def _texts(self, seen: Seen) -> None:
        said = self.actions[-1] if self.actions else ""
        if (seen.prompt, len(said) > 9 and said) in self._looked_at:
            return
        self._looked_at.add((seen.prompt, len(said) > 9 and said))
        actions = seen.contract.actions
        listed = all(name in seen.contract.system_prompt for name in actions)  # then the trainer lists them no more
        whole = "\n".join([seen.prompt, *(() if listed else [*actions, *actions.values()])])
        whole += "\n".join(text for pair in seen.contract.examples for text in pair)
        try:
            seen.text.encode()
        except UnicodeEncodeError:
            echoed = any("\ud800" <= char <= "\udfff" for char in said)
            self._note("text.echo" if echoed else "text.encoding", "the observation holds a lone surrogate")
        if found := MARKERS.search(whole):
            echoed = found[0] in said and "text.markers" not in self.log
            check, who = ("text.echo", "the reply's own") if echoed else ("text.markers", "the")
            self._note(check, f"the text holds {who} marker {found[0]!r}")
        if found := CONTROL.search(whole):
            check = "text.echo" if found[0] in said and "text.control" not in self.log else "text.control"
            self._note(check, f"the text holds the character {found[0]!a}")
        shown_before = self.last is not None and said[:_LONG_REPLY] in self.last.prompt
        if len(said) >= _LONG_REPLY and said[:_LONG_REPLY] in seen.text and not shown_before:
            self._note("text.echo", f"the text shows a reply of {len(said)} characters again")
        if not (seen.state.strip() or seen.terminated) and not (self.last is None and seen.contract.system_prompt):
            self._note("text.empty", "the observation is empty")
        if len(said) < _LONG_REPLY and len(whole) > self.most_tokens and (length := tokens(whole)) > self.most_tokens:
            self._note("text.long", f"a prompt has about {length} tokens, more than {self.most_tokens}")

    def _info(self, info: dict[str, Any], observation: str) -> None:
        try:
            read_metrics(info)
            for name in INFO_FLAGS:
                if info.get(name) is not None:
                    read_flag(f"info[{name!r}]", info[name])
        except EnvError as error:
            self._note("contract.info", str(error))
            for name in INFO_FLAGS:
                info.pop(name, None)
        for name in INFO_TEXTS:
            if not isinstance(info.get(name, ""), str):
                self._note("contract.info", f"info[{name!r}] is {_form(info[name])}, not text")
        parts = [info[name] for name in INFO_TEXTS[:2] if isinstance(info.get(name), str)]
        if any(part not in observation for part in parts):
            self._note("text.hidden", "long_term_text or short_term_text of info is not part of the observation")
        progression = info.get("progression", 0)
        if isinstance(progression, int | float | np.number) and not 0 <= progression <= 1:
            self._note("info.progression", f"info['progression'] is {progression}")
        if self._calls <= 20 and (name := _unpicklable(info)):
            self._note("info.pickle", f"info[{name!r}] cannot be pickled")

    def _compare_kept(self) -> None:
        if self._kept is not None and _looks(self._kept[0]) != self._kept[1]:
            self._note("info.shared", "the info of an earlier turn was changed by the next one")

    def _reward(self, reward: Any) -> float:
        if isinstance(reward, bool | np.bool_) or not isinstance(reward, int | float | np.number):
            self._note("reward.type", f"the reward is {_form(reward)}: {shown(_looks(reward) or '')}")
            return 0.0
        try:
            value = float(reward.real)
        except OverflowError:
            value = math.inf
        if not abs(value) <= LARGEST_REWARD:
            self._note("reward.finite", f"the reward is {value:g}; it must be finite, {LARGEST_REWARD:g} at most")
            return 0.0
        if abs(value) > LARGEST:
            self._note("reward.size", f"a reward of {value:g}")
        return value

    def _ends(self, terminated: Any, truncated: Any) -> tuple[bool, bool]:
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                self._note("ends.type", f"{name} is {_form(value)}: {shown(_looks(value) or '')}")
        terminated, truncated = _true(terminated), _true(truncated)
        if terminated and truncated:
            if len(self.actions) == time_limit(self.made()):  # gymnasium's wrapper says so of a game that ends there
                return True, False
            self._note("ends.both", "an episode ends terminated and truncated at once")
        return terminated, truncated


class ThreadedProbe(Probe):
    """An instance whose calls take turns in two threads, neither of them the main one, as a trainer's do."""

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
    """Return after how many turns gymnasium's own wrapper truncates; None if there is none."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            return env._max_episode_steps
        env = env.env
    return None


def _offered(env: gymnasium.Env) -> list[Any]:
    values = [env.get_wrapper_attr(name) for name in ("actions", "system_prompt") if env.has_wrapper_attr(name)]
    return [dict(value) if isinstance(value, Mapping) else value for value in values]


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def _looks(value: Any) -> str | None:
    """Return how a value looks in Python; None if it cannot be shown, as a whole number of thousands of figures."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - whatever a class of the environment raises
        return None


def _true(end: Any) -> bool:
    try:
        return bool(end)
    except ValueError:  # an array
        return bool(np.any(end))


def _unpicklable(info: Mapping[str, Any]) -> str:
    for name, value in info.items():
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - whatever the value raises
            return str(name)
    return ""


def _form(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
