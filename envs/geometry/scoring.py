"""Scoring of answers: numbers in schoolbook notation, parsed without evaluating code, and choices."""

import math
import re
from collections.abc import Sequence

_TOKEN = re.compile(r"\d+(?:\.\d+)?|(?<!\d)\.\d+|frac|sqrt|pi|[-+*/(){}]")
_DROPPED = re.compile(
    r"\\(?:left|right|text|mathrm|,|;|!| )|\^?\s*\{?\s*\\circ\s*\}?|[\s$°,\\]|(?:degrees?|units?|square|cm|mm|m)\b"
)
_UNIT = re.compile(  # unit after a number
    r"(?<![^\W\d_])\\?(?:(?:text|mathrm)\s*\{[^{}]*\}|(?:square\s+|sq\.?\s+)?"
    r"(?:units?|[ckm]?m|in(?:ch(?:es)?)?|f(?:oo|ee)?t|y(?:ar)?ds?|mi(?:les?)?|(?:centi|milli|kilo)?met(?:er|re)s?))"
    r"\s*(?:\^\s*(?:\{[23]\}|[23])|[²³])?\s*$",
    re.IGNORECASE,
)
_DEGREES = r"(?:°|\^?\s*\{?\s*\\circ\s*\}?|degrees?\b)"
_MINUTES = r"(?:[\u2032\u2019']|\^?\s*\{?\s*\\prime\s*\}?)"  # sign of minutes: a prime, an apostrophe or LaTeX
_SECONDS = r"(?:[\u2033\u201d\"]|[\u2032\u2019']{2}|\^?\s*\{?\s*\\prime\s*\\prime\s*\}?)"
_PARTS = re.compile(  # degrees, minutes and seconds of an angle
    rf"(\d+)\s*{_DEGREES}\s*([0-5]?\d(?:\.\d+)?)\s*{_MINUTES}(?:\s*([0-5]?\d(?:\.\d+)?)\s*{_SECONDS})?(?!\s*[\d.])"
)
_LETTERS = "ABCDEFGH"
_MOST_CHARS = 100


def is_right(said: str, right: str, tolerance: float, choices: Sequence[str] = ()) -> bool:
    """Return whether an answer is right.

    * With choices, the answer must be the letter of the right choice, such as `B`, `(b)` or `B. 12`, or its text.
    * A number may differ from the right number by at most `tolerance * max(1, abs(right))`.
    * Any other answer must be the same text as the right answer, ignoring spaces and case.

    Args:
        said: answer of the agent.
        right: right answer; with choices, the letter of the right choice.
        tolerance: relative tolerance of numbers.
        choices: possible answers; empty if the answer is free.
    """
    if choices:
        return _letter(said, choices) == right
    expected = number(right)
    if expected is None:
        return "".join(said.casefold().split()) == "".join(right.casefold().split())
    given = number(said)
    return given is not None and abs(given - expected) <= tolerance * max(abs(expected), 1.0)


def number(text: str) -> float | None:
    r"""Parse a number such as `12.5`, `3/4`, `2 \sqrt{5}`, `\frac{25}{4}`, `9\pi` or `27^\circ`.

    A name before the number, as in `x = 5`, a `\boxed` around it, and a unit or full stop after it are ignored.
    Minutes and seconds are parts of degrees: `12°30'` is 12.5. The result is None for a text that is not a number, such
    as `12°30`, and for the ambiguous `3 1/2` and `3\frac{1}{2}`, which may mean a sum or a product.
    """
    if len(text) > _MOST_CHARS:
        return None
    boxed = re.fullmatch(r"\s*\$?\s*\\boxed\s*\{(.*)\}\s*\$?\s*\.?\s*", text, re.DOTALL)
    plain = (boxed[1] if boxed else text).replace("−", "-").strip(" \n$").removesuffix(".")
    plain = _UNIT.sub("", plain.strip(" $"))
    plain = _PARTS.sub(_in_degrees, plain)
    if re.search(rf"{_DEGREES}\s*[\d.]", plain):  # digits follow a degree sign, so this is not one number
        return None
    plain = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", plain).replace("\\dfrac", "\\frac")
    if re.search(r"\d\s+\d+\s*/|\d\s*\\t?frac\s*\{?\s*\d+\s*\}?\s*\{?\s*\d+\s*\}?", plain):
        return None
    plain = plain.replace("π", "pi").replace("√", "sqrt").replace("·", "*").replace("×", "*").replace("\\cdot", "*")
    plain = _DROPPED.sub("", re.sub(r"^\s*\w+\s*=", "", plain))
    tokens = _TOKEN.findall(plain)
    if not tokens or "".join(tokens) != plain:
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if not reader.tokens and math.isfinite(value) else None


def _in_degrees(angle: re.Match[str]) -> str:
    degrees, minutes, seconds = angle.groups(default="0")
    return f"({degrees}+{minutes}/60+{seconds}/3600)"


def _letter(said: str, choices: Sequence[str]) -> str | None:
    letters = _LETTERS[: len(choices)]
    texts = ["".join(choice.casefold().split()) for choice in choices]
    plain = "".join(said.casefold().split())
    if plain in texts:
        return letters[texts.index(plain)]
    value = number(said)
    equal = [letter for letter, choice in zip(letters, choices, strict=True) if number(choice) == value]
    if value is not None and len(equal) == 1:
        return equal[0]
    match = re.match(rf"\(?([{letters}])\b", said.strip(), re.IGNORECASE)
    return match[1].upper() if match else None


class _Reader:
    """Parser of sums of products of numbers, roots and fractions."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def sum(self) -> float:
        sign = -1.0 if self._next("-") else 1.0
        value = sign * self._product()
        while self.tokens and self.tokens[0] in "+-":
            value += (1.0 if self.tokens.pop(0) == "+" else -1.0) * self._product()
        return value

    def _product(self) -> float:
        value = self._factor()
        while self.tokens and self.tokens[0] not in "+-)}":
            if self._next("/"):
                value /= self._factor()
            else:
                self._next("*")
                value *= self._factor()
        return value

    def _factor(self) -> float:
        if not self.tokens:
            raise ValueError("the number stops in the middle")
        token = self.tokens.pop(0)
        if token == "frac":
            return self._factor() / self._factor()
        if token == "sqrt":
            return math.sqrt(self._factor())
        if token == "pi":
            return math.pi
        if token in "({":
            value = self.sum()
            if not self._next(")" if token == "(" else "}"):
                raise ValueError("a bracket stays open")
            return value
        return float(token)  # raises a ValueError if a sign is in the wrong place

    def _next(self, token: str) -> bool:
        if self.tokens and self.tokens[0] == token:
            self.tokens.pop(0)
            return True
        return False
