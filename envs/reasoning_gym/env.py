"""Questions of reasoning-gym as episodes of one turn, with a score of the answer."""

import ast
import math
import random
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl_envs.extras import need
from agentrl_envs.text_env import PRINTABLE

BROKEN = {
    "game_of_life_halting": "its scorer gives 1.0 to any reply that is not empty",
    "coin_flip": "its scorer gives 0.94 to the reply 0",
    "circuit_logic": "its scorer gives 0.75 to the reply 0",
    "polynomial_equations": "its scorer gives 0.35 to 0.75 to the reply 0",
}
EVALUATED = (
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),  # the scorer calls eval()
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),  # sympy
)
"""Generators whose scorer runs the reply as Python; such a scorer gets only `harmless` answers."""
_WORD = re.compile(r"[^\W\d]\w*")
_MATHS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln"),
    *("sqrt", "pi", "erf", "Integral"),
)
_GROWING = ("exp", "sinh", "cosh")
_NUMBERS = ("E", "pi")  # names of numbers; other single letters are symbols
_MOST_BITS = 4096  # largest number of bits of a number that an answer computes
_MOST_CHARS = 2**20
_QUESTIONS = 2**31  # questions of a generator; with so many, training and held-out seeds rarely share any
_LISTED = ("acre", "gsm_symbolic", "list_functions", "word_ladder")  # generators that create all questions at once
_MOST_LISTED = 10_000


class ReasoningGym(gymnasium.Env[str, str]):
    """A question of a generator, scored from 0 to 1; each seed gives a different question.

    Args:
        dataset: name of the generator, such as `leg_counting`.
        config: settings of the generator, such as `{max_animals: 5}`.
        answer_after: text that comes before the answer, such as `Answer:`; a reply without this text is invalid. None
            means that the whole reply is the answer.

    Raises:
        ValueError: reasoning-gym is not installed or has no such generator or setting, or the scorer is broken.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared by gymnasium
    worker = "process"  # some generators' questions depend on PYTHONHASHSEED, which is 0 in processes
    free_text = True
    one_turn = True

    def __init__(self, dataset: str, config: Mapping[str, Any] | None = None, answer_after: str | None = None) -> None:
        factory = need("reasoning_gym.factory", extra="reasoning-gym")
        if dataset in BROKEN:
            raise ValueError(f"{dataset} of reasoning-gym is not supported: {BROKEN[dataset]}.")
        if dataset not in factory.DATASETS:
            known = ", ".join(sorted(set(factory.DATASETS) - set(BROKEN)))
            raise ValueError(f"reasoning-gym has no generator {dataset!r}; known: {known}.")
        if answer_after == "":
            raise ValueError("answer_after must be a text such as Answer:, or None if the whole reply is the answer.")
        if not isinstance(config, Mapping | None):
            raise ValueError(f"config must be settings of {dataset} and their values, not {config!r}.")
        size = _MOST_LISTED if dataset in _LISTED else _QUESTIONS
        try:
            self._questions = factory.create_dataset(dataset, **{"seed": 0, "size": size, **(config or {})})
        except (AssertionError, TypeError) as error:
            raise ValueError(
                f"{dataset} of reasoning-gym cannot be created with config {dict(config or {})}: {error}"
            ) from error
        if dataset == "list_functions":
            self._questions[0]  # the first call in a process returns another question than later calls
        self._evaluated = dataset in EVALUATED
        self.answer_after = answer_after
        self.observation_space = spaces.Text(_MOST_CHARS, min_length=0, charset=PRINTABLE)
        self.action_space = spaces.Text(_MOST_CHARS, min_length=0, charset=PRINTABLE)
        self._question: dict[str, Any] | None = None

    @property
    def system_prompt(self) -> str:
        """Instruction that says where in the reply the answer must be."""
        if self.answer_after is None:
            return "Reply with the answer only."
        return f"Think, then end your reply with {self.answer_after} and the answer only."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask the question of this seed."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(len(self._questions)))
        shared = random.getstate()
        random.seed(number)  # list_functions uses the global generator
        try:
            self._question = self._questions[number]
        finally:
            random.setstate(shared)
        return str(self._question["question"]), {"success": False, "progression": 0.0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer; the score is 0 if the scorer fails."""
        if self._question is None:
            raise gymnasium.error.ResetNeeded("The episode is over or has not begun: call reset() before step().")
        question, self._question = self._question, None
        found, answer = True, action.strip()
        if self.answer_after is not None:
            _, found_mark, answer = action.rpartition(self.answer_after)
            found, answer = bool(found_mark), answer.strip()
        score, failed = self._score(answer, question) if found else (0.0, False)
        info = {
            "success": score >= 1.0,
            "progression": score,
            "invalid_action": not found,
            "metrics": {"scorer_errors": float(failed)},
        }
        return "", score, True, False, info

    def _score(self, answer: str, question: dict[str, Any]) -> tuple[float, bool]:
        """Return the score of an answer, and whether the scorer failed."""
        if self._evaluated and not harmless(answer):
            return 0.0, True
        try:
            score = float(self._questions.score_answer(answer, question))
        except Exception:  # noqa: BLE001 - third-party code may raise anything
            return 0.0, True
        return (score, False) if math.isfinite(score) else (0.0, True)


def harmless(answer: str) -> bool:
    """Return whether an answer that is run as Python is only a value or a formula, and is computed quickly.

    Names in a harmless answer are single letters, the letters of string_insertion, or mathematical functions. Quoted
    texts beside a bracket are refused, since sympy's `S` runs a text. Factorials and towers of powers, such as
    `9**9**9`, are refused, since they would take hours.
    """
    words = _WORD.findall(answer)
    named = all(len(word) == 1 or word in _MATHS or set(word) <= set("ABCDE") for word in words)
    called = "(" in answer and ("'" in answer or '"' in answer)
    return answer.isascii() and "\\" not in answer and "!" not in answer and named and not called and _is_small(answer)


def _is_small(answer: str) -> bool:
    """Return whether an answer computes only numbers of limited size; true for text that is not Python."""
    try:
        _bits(ast.parse(answer.strip(), mode="eval").body)
    except OverflowError:
        return False
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return True


def _bits(node: ast.AST) -> float:
    """Return an upper estimate of the bits of a formula's value; infinity for a list or a text.

    Raises:
        OverflowError: a part of the formula exceeds the limit, or is not a formula.
    """
    if isinstance(node, ast.Constant):
        return float(max(node.value.bit_length(), 1)) if isinstance(node.value, int) else _bits_of_other(node.value)
    if isinstance(node, ast.Name):
        return 2.0 if node.id in _NUMBERS else 1.0
    if isinstance(node, ast.List | ast.Tuple):
        for part in node.elts:
            _bits(part)
        return math.inf
    if isinstance(node, ast.UnaryOp):
        bits = _bits(node.operand)
    elif isinstance(node, ast.Call):
        bits = max((_bits(part) for part in node.args), default=1.0)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        # With a symbol in the formula, sympy computes no number.
        if names.intersection(_GROWING) and names.issubset((*_MATHS, *_NUMBERS)):
            bits = 2.0 ** min(bits, 64)
    elif isinstance(node, ast.BinOp):
        left, right = _bits(node.left), _bits(node.right)
        if isinstance(node.op, ast.Pow | ast.LShift):
            bits = left * 2.0 ** min(right, 64)
        elif isinstance(node.op, ast.Add | ast.Sub):
            bits = max(left, right) + 1
        else:
            bits = left + right
    else:
        raise OverflowError(f"{type(node).__name__} is no part of a formula")
    if bits > _MOST_BITS:
        raise OverflowError(f"a number may have {_MOST_BITS} bits")
    return bits


def _bits_of_other(value: object) -> float:
    return 64.0 if isinstance(value, float | complex) else math.inf
