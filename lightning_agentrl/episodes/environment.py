"""An environment in the thread or process that runs it: its answers are checked, its errors get a type.

The processes of environments import this file, so it imports nothing but gymnasium, numpy and the errors.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, SupportsFloat

import gymnasium
import numpy as np

from lightning_agentrl.episodes.contract import (
    INFO_FLAGS,
    INFO_TEXTS,
    Contract,
    as_float,
    check_reward,
    contract_error,
    read_contract,
    read_flag,
    read_metrics,
    well_formed,
)
from lightning_agentrl.episodes.observation import OwnMessages, fingerprint_of, is_image, read_observation, with_type
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.errors.secrets import masked

Generator = np.random.Generator | np.random.RandomState | random.Random
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, type)
_CODE = (ModuleType, FunctionType, MethodType, BuiltinFunctionType)  # lead to what is not the object's own


def generators(root: object) -> list[Generator]:
    """Return the generators of random numbers that an object holds, in its attributes and in what these hold."""
    found, seen, waiting = [], set[int](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (*_PLAIN, *_CODE, random.SystemRandom)):
            continue
        seen.add(id(one))
        if isinstance(one, Generator):
            found.append(one)
        else:
            waiting += reversed(list(_held(one)))
    return found


def _held(one: Any) -> Iterator[Any]:
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (getattr(one, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def global_state() -> bytes:
    """Return where the generators of Python and numpy are that all share."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def reseed(generator: Generator, seed: int) -> None:
    """Let a generator, and all who hold it, draw from a seed."""
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)


def state_of(generator: Generator) -> bytes:
    """Return where a generator is; the same until it is drawn from."""
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


_FORMS = {
    "reset": ("(observation, info)", 2),
    "step": ("(observation, reward, terminated, truncated, info)", 5),
}
_OUR_CALLS = (__name__, "lightning_agentrl.episodes.recipe")  # modules between the trainer and an environment


@dataclass(frozen=True)
class Answer:
    """What an environment answered, and what it offers from now on."""

    observation: str  # long-term text
    short_term: str
    contract: Contract
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    mended: bool = False  # its texts had lone surrogates
    images: tuple[np.ndarray, ...] = field(default=(), compare=False)  # uint8 [height, width, 3], RGB
    messages: OwnMessages = ()  # the environment's own, which say all of the observation

    @property
    def text(self) -> str:
        """All of the observation's text, as a prompt shows it now."""
        return "\n".join(part for part in (self.short_term, self.observation) if part)

    @property
    def fingerprint(self) -> str:
        """What tells observations apart: all of the text, and a hash of each image."""
        return fingerprint_of(self.text, self.images)


class Hosted(Protocol):
    """An environment somewhere. Every call blocks, and raises an EnvError if the environment fails."""

    @property
    def contract(self) -> Contract:
        """What it offers before its first episode."""

    def reset(self, seed: int) -> Answer: ...

    def step(self, action: str) -> Answer: ...

    def draw(self) -> bytes: ...

    def renew(self, seed: int) -> None:
        """Draw other random numbers from now on."""

    def drew(self) -> bool:
        """Whether random numbers were drawn since they were renewed."""

    def close(self) -> None:
        """Close the environment, if it is still there."""

    def end(self) -> None:
        """End a running call, where that is possible."""


class Environment:
    """A gymnasium environment in this process.

    Args:
        make: makes it.
        alone: the process is its own, so that it may go to another folder.

    Raises:
        EnvError: it cannot be made, or an attribute has a wrong type.
        ConfigError: raised by ``make``.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], alone: bool = False) -> None:
        self._folder = None if alone else _working_folder()
        with AsEnvErrors():
            self.env = make()
            self._check_folder()
            self.contract = self._offered = read_contract(self.env, begun=False)
            _check_code(self.env)
        self._renewed: list[tuple[Generator, bytes]] = []  # generators, and where they were then
        self._global = b""

    def reset(self, seed: int) -> Answer:
        """Begin the episode of this seed and return its first answer."""
        with AsEnvErrors():
            observation, info = _values("reset", self.env.reset(seed=seed))
            return self._answer(observation, info)

    def step(self, action: str) -> Answer:
        """Take one action and return the answer."""
        with AsEnvErrors():
            observation, reward, terminated, truncated, info = _values("step", self.env.step(action))
            if not isinstance(reward, float) and not isinstance(reward, SupportsFloat):  # which takes long to ask
                raise contract_error(f"the environment gave {with_type('a reward', reward)}; it must be a number")
            try:
                number = as_float(reward)
            except (TypeError, ValueError):  # an array
                raise contract_error(
                    f"the environment gave {with_type('a reward', reward)}; it must be one number"
                ) from None
            check_reward("the environment", number)
            ends = read_flag("terminated", terminated), read_flag("truncated", truncated)
            return self._answer(observation, info, number, *ends)

    def draw(self) -> bytes:
        """Return a PNG of the environment as it is."""
        with AsEnvErrors():
            frame = np.asarray(self.env.render())
            if not is_image(frame):
                raise contract_error(
                    f"the environment draws {frame.dtype} {list(frame.shape)}; with render_mode 'rgb_array' its "
                    "render() must give uint8 [height, width, 3]"
                )
            return png((frame,))

    def renew(self, seed: int) -> None:
        """Let all generators that the environment holds draw from seeds that are made of this one."""
        with AsEnvErrors():
            own: list[Generator] = [self.env.unwrapped.np_random]
            own += [one for one in generators(self.env.unwrapped) if one is not own[0]]
            for one, child in zip(own, np.random.SeedSequence(seed).generate_state(len(own)), strict=True):
                reseed(one, int(child))
            self._renewed = [(one, state_of(one)) for one in own]
            self._global = global_state()

    def drew(self) -> bool:
        """Whether one of them was drawn from since, or one that all share, or there are others now."""
        known = {id(one) for one, _ in self._renewed}
        with AsEnvErrors():
            return (
                self._global != global_state()
                or any(state_of(one) != state for one, state in self._renewed)
                or any(id(one) not in known for one in generators(self.env.unwrapped))
            )

    def close(self) -> None:
        with AsEnvErrors():
            self.env.close()

    def end(self) -> None:
        """Do nothing: a call in a thread cannot be ended."""

    def _check_folder(self) -> None:
        """Go back to the working folder of the process, where the run writes, if the environment has left it.

        Raises:
            EnvError: it has.
        """
        if self._folder is None or _working_folder() in (self._folder, None):  # removed: nothing has left it
            return
        os.chdir(self._folder)
        raise contract_error(
            "the environment changes the working folder of the trainer, where the run writes; give it a process of its "
            "own (key worker: process of the environment), or let it use whole paths"
        )

    def _answer(
        self, observation: Any, info: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Answer:
        self._check_folder()
        given = read_observation(observation)
        shown = given.mended()
        if not isinstance(info, Mapping):
            raise contract_error(f"the environment gave {with_type('an info', info)}; it must be a dictionary")
        given_texts = {name: info[name] for name in INFO_TEXTS if name in info}
        for name, text in given_texts.items():
            if not isinstance(text, str):
                raise contract_error(f"the environment gave {with_type(f'an info[{name!r}]', text)}; it must be text")
        for name in INFO_FLAGS:
            if (flag := info.get(name)) is not None and not isinstance(flag, bool):
                read_flag(f"info[{name!r}]", flag)
        texts = {name: well_formed(text) for name, text in given_texts.items()}
        parts = {} if shown.messages else texts  # the observation by its duration, where it is not in messages
        self._offered = read_contract(self.env, begun=True, last=self._offered)
        return Answer(
            observation=parts.get("long_term_text", shown.text),
            short_term=parts.get("short_term_text", ""),
            contract=self._offered,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            metrics=read_metrics(info),
            info={**info, **texts},
            mended=texts != given_texts or (shown is not given and shown != given),
            images=shown.images,
            messages=shown.messages,
        )


def _working_folder() -> str | None:
    """Return the working folder of this process; None where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _check_code(env: gymnasium.Env) -> None:
    """Ask an environment that can tell whether its author or its arguments made a mistake.

    Raises:
        EnvError: the environment's sentence.
    """
    if env.has_wrapper_attr("check_code"):
        try:
            env.get_wrapper_attr("check_code")()
        except ValueError as error:
            raise contract_error(str(error)) from None


class AsEnvErrors:  # made of a generator, it would take four times as long
    """A context that makes an EnvError of whatever an environment raises, even of what would end the process."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, EnvError | ConfigError):
            return
        if isinstance(error, KeyboardInterrupt) and _interrupts_come_here():
            return
        sentence = masked(f"the environment raised {_named(error)}")
        raise EnvError(type(error).__name__, sentence, masked(_trace(error))) from None


def _interrupts_come_here() -> bool:
    """Return whether Ctrl-C is raised in this thread."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _named(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).splitlines()[0].split())


def _trace(error: BaseException) -> str:
    """Return the traceback below our own calls and gymnasium's, with the causes of the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module not in _OUR_CALLS and not module.startswith("gymnasium."):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _values(call: str, answer: Any) -> tuple[Any, ...]:
    """Return what reset or step gave, if it has gymnasium's form.

    Raises:
        EnvError: it has another form.
    """
    form, count = _FORMS[call]
    if isinstance(answer, tuple) and len(answer) == count:
        return answer
    got = f"{len(answer)} values" if isinstance(answer, tuple) else with_type("a value", answer)
    raise contract_error(f"the environment's {call} gave {got}; it must give {form}")


def png(images: Sequence[np.ndarray], longest: int | None = None) -> bytes:
    """Return images, uint8 [height, width, 3], side by side as one PNG, which has at most ``longest`` pixels a side."""
    from PIL import Image

    canvas = Image.new("RGB", (sum(one.shape[1] for one in images), max(one.shape[0] for one in images)), "white")
    left = 0
    for one in images:
        canvas.paste(Image.fromarray(one), (left, 0))
        left += one.shape[1]
    if longest is not None:
        canvas.thumbnail((longest, longest))
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()
