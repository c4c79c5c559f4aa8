"""Base class of text environments: texts or images as observations, named actions, and an `info` for each turn."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypedDict, cast, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from agentrl_envs.own_code import check_data, try_out, two_values

PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))
"""Printable ASCII and the newline: the characters of observations and actions."""

_TRAILING_PUNCTUATION = ".,;:!?"
_REMARK = "The last reply named no action, so {action} was taken."

Shown = Literal["text", "image", "both"]
"""Content of an observation: the state as text, as images, or as both."""


class Seen(TypedDict):
    """An observation with images; prompts show the images before the text."""

    text: str
    images: tuple[NDArray[np.uint8], ...]
    """RGB images, each [height, width, 3]."""


class TextInfo(TypedDict):
    """The `info` of every `reset` and `step`. An environment may add further keys."""

    success: bool
    progression: float
    executed_action: str
    invalid_action: bool
    long_term_text: str
    short_term_text: str
    metrics: dict[str, float]


def normalise(text: str) -> str:
    """Normalize a text to compare it with actions: first line, lower case, single spaces, no final punctuation."""
    lines = text.strip().splitlines()
    line = lines[0] if lines else ""
    return " ".join(line.lower().replace("_", " ").split()).rstrip(_TRAILING_PUNCTUATION).strip()


class TextEnv(gymnasium.Env[str | Seen, str], ABC):
    """A gymnasium environment whose actions are texts, and whose observations are texts, with or without images.

    A subclass sets the attributes below (on the class, or on the instance before the first `reset`) and defines four
    members: `_start`, `_act`, `_observe` and the property `system_prompt`. The base class maps texts to actions, counts
    turns, ends the episode at the limit and fills `info`.

    * A text that names no action executes `default_action` and sets `info["invalid_action"]`; the reward is unchanged.
    * The limit `max_turns` gives `truncated`, never `terminated`; an episode that ends by itself in its last turn is
      only `terminated`.
    * The observation is the short-term text (relevant only now), if any, followed by the long-term text. With
      images it is a dictionary, `Seen`. If the images show the state (`observation="image"`), the text comes
      from `_caption` in place of `_observe`.
    * All randomness must come from `self.np_random`, or from seeds drawn from it.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it as an instance attribute
    max_chars: ClassVar[int] = 8192

    actions: Mapping[str, str]
    """Action name -> one-line description, in the order in which a prompt lists them."""
    aliases: Mapping[str, str] = {}
    """Other name of an action, as `normalise` returns it -> action name. The trainer uses these aliases, too."""
    default_action: str
    """Action that is executed when a text names no action."""
    max_turns: int
    """Turns after which an episode is truncated."""
    free_text: bool = False
    """Whether the whole reply is the action; if so, `actions` is unused, and `resolve_action` interprets the reply."""
    observation: Shown = "text"
    """Content of observations: "text", "image" or "both"."""
    remarks: bool = False
    """Whether the short-term text says that the last text named no action (texts from the trainer always name one)."""

    def __init__(self) -> None:
        self.observation_space = spaces.Text(max_length=self.max_chars, min_length=0, charset=PRINTABLE)
        self.action_space = spaces.Text(max_length=self.max_chars, min_length=0, charset=PRINTABLE)
        self.turn = 0
        """Turns played in the current episode."""
        self.invalid = False
        """Whether the last reply named no action."""
        self._active = False
        self._won = False

    # ---- members that a subclass defines -------------------------------------------------------------------------

    @property
    @abstractmethod
    def system_prompt(self) -> str:
        """Rules and task for the policy. Valid after `reset`; episodes may have different texts."""

    @property
    def examples(self) -> Sequence[tuple[str, str]]:
        """Worked examples (observation text, action name) for a few-shot prompt. Valid after `reset`; may be empty."""
        return ()

    @abstractmethod
    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin an episode. `self.np_random` is seeded already; `seed` is for information only."""

    @abstractmethod
    def _act(self, action: str) -> tuple[float, bool]:
        """Execute the action of this name; return the reward and whether the episode ended by itself."""

    @abstractmethod
    def _observe(self) -> tuple[str, str]:
        """Return the current long-term text and the current short-term text, which may be empty."""

    def _images(self) -> tuple[NDArray[np.uint8], ...]:
        """Return the images of the current observation; `step` and `reset` call this unless `observation` is "text"."""
        raise NotImplementedError(f"{type(self).__name__} has no images.")

    def _caption(self) -> tuple[str, str]:
        """Return the long-term and the short-term text for images that show the state; by default both texts are empty.

        The texts describe only what the images do not show.
        """
        return "", ""

    def cut_off(self) -> bool:
        """Return whether something other than `max_turns` has just truncated the episode; false by default."""
        return False

    def success(self) -> bool:
        """Return whether the episode's task is solved; by default, whether it terminated with a positive reward."""
        return self._won

    def progression(self) -> float:
        """Return how much of the task is solved, from 0 to 1; by default 1 on success and 0 otherwise."""
        return float(self.success())

    def metrics(self) -> dict[str, float]:
        """Return metrics of the episode so far, by name; a trainer logs the last turn's metrics. Empty by default."""
        return {}

    def extra_info(self) -> dict[str, Any]:
        """Return further entries of `info`; none by default."""
        return {}

    def solver(self) -> Callable[[], str] | None:
        """Return a scripted player of this episode, which names one action per call; None without such a player.

        Valid after `reset`. The player may read the state of the game, and must be able to act in any state.
        """
        return None

    # ---- members that the base class defines ---------------------------------------------------------------------

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the action that `text` names and True, or the default action and False if it names no action."""
        if self.free_text:
            return text, True
        if (exact := text.strip()) in self.actions:  # try an exact match first, for names such as h and H
            return exact, True
        said = normalise(text)
        for name in self.actions:
            if said == normalise(name):
                return name, True
        if said in self.aliases:
            return self.aliases[said], True
        return self.default_action, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str | Seen, dict[str, Any]]:
        """Begin an episode; equal seeds give equal episodes."""
        super().reset(seed=seed)
        self._check_data()
        self.turn = 0
        self.invalid = False
        self._won = False
        self._start(seed, options)
        self._active = True
        return self._report(executed="")

    def step(self, action: str) -> tuple[str | Seen, float, bool, bool, dict[str, Any]]:
        """Play a turn with the action that the text names."""
        if not self._active:
            raise gymnasium.error.ResetNeeded("The episode is over or has not begun: call reset() before step().")
        name, valid = self.resolve_action(action)
        self.invalid = not valid
        reward, terminated = two_values(self, "_act", self._act(name))
        self.turn += 1
        self._won = bool(terminated and reward > 0)
        truncated = not terminated and (self.turn >= self.max_turns or self.cut_off())
        self._active = not (terminated or truncated)
        observation, info = self._report(executed=name)
        return observation, float(reward), bool(terminated), truncated, info

    def _show(self, observation: Shown, image: spaces.Space[NDArray[np.uint8]]) -> None:
        """Set the content of observations; the constructor of an environment with images calls this method.

        Args:
            observation: content of observations: "text", "image" or "both".
            image: space of one image.

        Raises:
            ValueError: `observation` is not one of these three values.
        """
        if observation not in get_args(Shown):
            raise ValueError(f'observation must be "text", "image" or "both", not {observation!r}.')
        self.observation = observation
        if observation != "text":
            self.remarks = not self.free_text
            both = spaces.Dict({"text": self.observation_space, "images": spaces.Sequence(image)})
            self.observation_space = cast(spaces.Space[str | Seen], both)

    def _report(self, executed: str) -> tuple[str | Seen, dict[str, Any]]:
        method = "_caption" if self.observation == "image" else "_observe"
        long_term, short_term = two_values(self, method, getattr(self, method)())
        if self.invalid and self.remarks:
            short_term = "\n".join(filter(None, (_REMARK.format(action=executed), short_term)))
        info = TextInfo(
            success=self.success(),
            progression=self.progression(),
            executed_action=executed,
            invalid_action=self.invalid,
            long_term_text=long_term,
            short_term_text=short_term,
            metrics=self.metrics(),
        )
        text = f"{short_term}\n{long_term}" if short_term and long_term else short_term or long_term
        observation = text if self.observation == "text" else Seen(text=text, images=self._images())
        return observation, {**cast(dict[str, Any], info), **self.extra_info()}

    def check_code(self) -> None:
        """Check the code of a subclass before a run; a class from outside this package also plays one turn.

        Raises:
            ValueError: the code has an error; the message says how to fix it.
        """
        check_data(self)
        if type(self).__module__.split(".")[0] != __name__.split(".")[0]:
            try_out(self)

    def _check_data(self) -> None:
        """Raise a ValueError about the first attribute that is invalid."""
        check_data(self)
        owner = type(self).__name__
        if not self.free_text and self.default_action not in self.actions:
            raise ValueError(f"{owner}: default action {self.default_action!r} is not one of {list(self.actions)}.")
        for spoken, name in self.aliases.items():
            if name not in self.actions:
                raise ValueError(f"{owner}: alias {spoken!r} means {name!r}, which is not one of {list(self.actions)}.")
            if spoken != normalise(spoken):
                raise ValueError(f"{owner}: alias {spoken!r} can never match; write it as {normalise(spoken)!r}.")
