"""Base environment for questions about pictures, with a limited number of answer checks, which cost reward."""

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from agentrl_envs.geometry.scoring import is_right
from agentrl_envs.picture_space import PictureSpace
from agentrl_envs.tags import Answer, CallError, read_tag, resolve_tag
from agentrl_envs.text_env import TextEnv
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.geometry")
_CHECK_PRICE = 0.1


@dataclass(frozen=True)
class PictureTask:
    """A question about a picture.

    Args:
        question: text of the question.
        answer: right answer; with choices, the letter of the right choice.
        picture: picture that the question is about, RGB.
        choices: possible answers; empty if the question asks for a number.
    """

    question: str
    answer: str
    picture: Image.Image
    choices: tuple[str, ...] = ()


class PictureQuestion(TextEnv):
    """Answer a question about a picture: a right answer pays 1, a wrong answer 0; both end the episode.

    The reply is free text; its last `<answer>` or `<call>` counts. A check reports whether an answer is right and
    costs 0.1. If a reply cannot be used, the next observation gives the reason. A check or an unusable
    reply takes a turn.

    Args:
        checks: number of checks of an answer in an episode, 0 to 2; more checks would let an agent guess.
        tolerance: relative tolerance of numbers, 0 or more and less than 1.
        max_turns: turns after which an episode is truncated.
        most_px: largest side of a picture in pixels.
    """

    free_text = True
    actions = _WORDING.actions
    default_action = _WORDING.default_action

    def __init__(self, checks: int, tolerance: float, max_turns: int, most_px: int) -> None:
        super().__init__()
        if checks not in (0, 1, 2):
            raise ValueError(f"An episode has 0 to 2 checks, not {checks}.")
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be 0 or more and less than 1, not {tolerance}.")
        self.checks = checks
        self.tolerance = tolerance
        self.max_turns = max_turns
        self._show("image", PictureSpace(most_px))
        self._task = PictureTask("", "", Image.new("RGB", (32, 32)))  # placeholder until the first episode
        self._restart()

    @abstractmethod
    def _draw_task(self) -> PictureTask:
        """Return the task of a new episode, drawn with `self.np_random`."""

    def _restart(self) -> None:
        self._new: tuple[np.ndarray, ...] = (np.asarray(self._task.picture),)
        self._text, self._error, self._checked = _WORDING.texts["begin"], "", ""
        self._calls = 0
        self._right = False

    @property
    def system_prompt(self) -> str:
        """Text that explains the tags and checks, and asks the question with its choices."""
        texts, task = _WORDING.texts, self._task
        count = texts["once"] if self.checks == 1 else texts["times"].format(checks=self.checks)
        listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCDEFGH", task.choices, strict=False))
        check = "\n\n" + texts["check"].format(count=count) if self.checks else ""
        return _WORDING.system_prompt.format(form=self._form, check=check, question=task.question + listed)

    def resolve_action(self, text: str) -> tuple[str, bool]:
        """Return the last tag of a reply, and whether this tag can be used."""
        return resolve_tag(text, self._read)

    def success(self) -> bool:
        """Return whether the answer is right."""
        return self._right

    def metrics(self) -> dict[str, float]:
        """Return the number of checks."""
        return {"checks": float(self._calls)}

    def extra_info(self) -> dict[str, Any]:
        """Return the question, the number of tool calls so far, and what was wrong with the last reply."""
        return {"question": self._task.question, "tool_calls": self._calls, "error": self._error}

    def solver(self) -> Callable[[], str]:
        """Return a player that knows the answer."""
        return lambda: f"<answer>{self._task.answer}</answer>"

    @property
    def _form(self) -> str:
        return _WORDING.texts["form_choice" if self._task.choices else "form_number"]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._task = self._draw_task()
        self._restart()

    def _read(self, tag: str) -> tuple[str, str]:
        """Return "answer" or "check", and the text of the answer.

        Raises:
            CallError: the tag cannot be used.
        """
        call = read_tag(tag)
        if isinstance(call, Answer):
            return "answer", call.text
        if call.tool != "check" or not self.checks:
            raise CallError(_WORDING.texts["unknown"].format(tool=json.dumps(call.tool[:20])))
        said = call.arguments.get("answer")
        if isinstance(said, bool) or not isinstance(said, str | int | float):
            raise CallError(_WORDING.texts["unnamed"])
        return "check", str(said)

    def _act(self, action: str) -> tuple[float, bool]:
        self._new, self._error = (), ""
        try:
            kind, said = self._read(action)
        except CallError as error:
            self._error, self._text = str(error), _WORDING.texts["fault"]
            return 0.0, False
        right = is_right(said, self._task.answer, self.tolerance, self._task.choices)
        if kind == "answer":
            self._right = right
            self._text = _WORDING.texts["right" if right else "wrong"]
            return float(right), True
        if self._calls >= self.checks:
            self._text = _WORDING.texts["no_checks"]
            return 0.0, False
        self._calls += 1
        self._checked = said[:40]
        self._text = _WORDING.texts["checked_right" if right else "checked_wrong"]
        return -_CHECK_PRICE, False

    def _images(self) -> tuple[np.ndarray, ...]:
        return self._new

    def _observe(self) -> tuple[str, str]:
        return self._caption()

    def _caption(self) -> tuple[str, str]:
        left = _WORDING.texts["left"].format(turns=max(self.max_turns - self.turn, 0))
        return self._text.format(fault=self._error, form=self._form, answer=self._checked, left=left), ""
