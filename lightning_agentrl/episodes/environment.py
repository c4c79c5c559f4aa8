"""Wrapper of a gymnasium environment that checks and converts the environment's return values.

Environment processes import this file, so it imports only gymnasium, numpy and the errors.
"""

from __future__ import annotations

import io
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from lightning_agentrl.episodes.contract import Contract, ContractReader
from lightning_agentrl.episodes.generators import RandomState
from lightning_agentrl.episodes.observation import (
    OwnMessages,
    contract_error,
    fingerprint_of,
    is_image,
    read_flag,
    read_info,
    read_observation,
    read_reward,
    well_formed,
    with_type,
)
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.errors.secrets import masked

CALL = ("key", "follows", "messages")  # parts of a call that its fingerprint contains


@dataclass(frozen=True)
class Answer:
    """Answer of an environment to a reset or step, and the environment's contract after this call."""

    observation: str  # long-term text
    short_term: str
    contract: Contract
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    mended: bool = False  # whether lone surrogates in the texts were replaced
    images: tuple[np.ndarray, ...] = field(default=(), compare=False)  # uint8 [height, width, 3], RGB
    messages: OwnMessages = ()  # the environment's own messages, which contain the whole observation
    call: Mapping[str, Any] | None = None  # the agent's next call, if the environment keeps its own history

    @property
    def text(self) -> str:
        """The whole text of the observation, as the next prompt shows it."""
        return "\n".join(part for part in (self.short_term, self.observation) if part)

    @property
    def fingerprint(self) -> str:
        """A text that identifies the observation."""
        shown = self.text if self.call is None else json.dumps([self.call.get(name) for name in CALL])
        return fingerprint_of(shown, self.images)


class Environment:
    """A gymnasium environment in this process.

    Args:
        make: function that creates the environment.
        alone: whether the process runs nothing else.
        texts: names of further attributes to read after each reset and step.

    Raises:
        EnvError: the environment cannot be created.
        ConfigError: raised by ``make``.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], alone: bool = False, texts: Sequence[str] = ()) -> None:
        self._alone = alone
        self._folder = os.getcwd()
        with AsEnvErrors():
            self.env = make()
            self._check_code()
        self._reader = ContractReader(texts)
        self._random: RandomState | None = None

    def reset(self, seed: int) -> Answer:
        """Begin the episode with this seed and return its first answer."""
        with AsEnvErrors():
            observation, info = _values(self.env.reset(seed=seed), "reset", "(observation, info)", 2)
            answer = self.answer(observation, info)
        if not self._alone and answer.contract.worker == "process":
            raise contract_error(
                "the environment needs a separate process, but its class does not declare it (attribute `worker`); "
                "declare it on the registered class, or set the environment's key worker to process"
            )
        return answer

    def step(self, action: str) -> Answer:
        """Take one action and return the answer."""
        with AsEnvErrors():
            form = "(observation, reward, terminated, truncated, info)"
            observation, reward, terminated, truncated, info = _values(self.env.step(action), "step", form, 5)
            ends = read_flag("terminated", terminated), read_flag("truncated", truncated)
            return self.answer(observation, info, read_reward(reward), *ends)

    def draw(self) -> bytes:
        """Return a PNG of the environment's current state."""
        with AsEnvErrors():
            frame = np.asarray(self.env.render())
            if not is_image(frame):
                raise contract_error(
                    f"the environment draws {frame.dtype} {list(frame.shape)}; with render_mode 'rgb_array' its "
                    "render() must give uint8 [height, width, 3]"
                )
            return png((frame,))

    def renew(self, seed: int) -> None:
        """Reseed all random generators of the environment."""
        with AsEnvErrors():
            self._random = RandomState(self.env.unwrapped, seed)

    def drew(self) -> bool:
        """Return whether random numbers were drawn, or generators created, since :meth:`renew`."""
        assert self._random is not None
        with AsEnvErrors():
            return self._random.changed()

    def wait(self) -> None:
        """Do nothing: the environment exists."""

    def close(self) -> None:
        with AsEnvErrors():
            self.env.close()

    def end(self) -> None:
        """Do nothing: a call in a thread cannot be stopped."""

    def answer(
        self, observation: Any, info: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Answer:
        """Check the return values of ``reset`` or ``step``, and return them with the current contract."""
        if not self._alone and os.getcwd() != self._folder:
            os.chdir(self._folder)
            raise contract_error(
                "the environment changes the working folder of the trainer, where the run writes; run it in a separate "
                "process (the environment's key worker: process), or let it use absolute paths"
            )
        seen = read_observation(observation)
        given, metrics = read_info(info)
        texts = {name: well_formed(text) for name, text in given.items()}
        parts = {} if seen.messages else texts  # messages show the whole observation
        return Answer(
            observation=parts.get("long_term_text", seen.text),
            short_term=parts.get("short_term_text", ""),
            contract=self._reader.read(self.env),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            metrics=metrics,
            info={**info, **texts},
            mended=seen.mended or texts != given,
            images=seen.images,
            messages=seen.messages,
            call=seen.call,
        )

    def _check_code(self) -> None:
        """Call the environment's method ``check_code``, if it has one, and raise its ValueError as an EnvError."""
        if self.env.has_wrapper_attr("check_code"):
            try:
                self.env.get_wrapper_attr("check_code")()
            except ValueError as error:
                raise contract_error(str(error)) from None


class AsEnvErrors:
    """Context that turns every exception of an environment, including SystemExit, into an EnvError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, EnvError | ConfigError | KeyboardInterrupt):
            return
        said = " ".join(traceback.format_exception_only(error)[0].split())
        # Keep only the environment's part of the traceback, without frames of this package and gymnasium.
        own = error.__traceback__
        while own and own.tb_next and str(own.tb_frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
            own = own.tb_next
        lines = "".join(traceback.format_exception(type(error), error, own))
        raise EnvError(type(error).__name__, masked(f"the environment raised {said}"), masked(lines)) from None


_BETWEEN = ("lightning_agentrl", "gymnasium")  # packages between the trainer and an environment


def _values(answer: Any, call: str, form: str, count: int) -> tuple[Any, ...]:
    """Return the values of a reset or step, if it returned a tuple of the right length.

    Args:
        answer: return value of the environment.
        call: name of the call, for the message.
        form: expected form, for the message.
        count: expected number of values.

    Raises:
        EnvError: the environment's return value does not have the form that gymnasium prescribes.
    """
    if isinstance(answer, tuple) and len(answer) == count:
        return answer
    got = f"{len(answer)} values" if isinstance(answer, tuple) else with_type("a value", answer)
    raise contract_error(f"the environment's {call} returned {got}; it must return {form}")


def png(images: Sequence[np.ndarray], longest: int | None = None) -> bytes:
    """Return images side by side as one PNG.

    Args:
        images: images, uint8 [height, width, 3].
        longest: largest width and height in pixels, to which the PNG is scaled down; None means no scaling.
    """
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
