"""Read and check the return values of ``reset`` and ``step``.

Environment processes import this file, so it imports only numpy and the errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, SupportsFloat

import numpy as np

from lightning_agentrl.errors.faults import EnvError

# Kind of an error that counts as wrong input if a check before the run finds the error.
CONTRACT = "contract"
REWARD = "reward"  # kind of an error in a reward
LARGEST_REWARD = 3.4e38  # the largest number of float32
INFO_TEXTS = ("long_term_text", "short_term_text", "executed_action")  # texts in info
INFO_FLAGS = ("success", "invalid_action")  # flags in info; None means unknown
ROLES = ("user", "tool", "assistant")  # roles of an environment's own messages
_OUR_METRICS = ("retries", "judge")  # reserved names under env/, besides the prefixes in the next line
_OUR_PREFIXES = ("errors/", "lost/")

# The same type as in prompts/memory.py, which environment processes do not import.
OwnMessages = tuple[tuple[str, tuple[str | None, ...]], ...]
"""Role and texts of each message in order; None stands for the next image of the observation."""


@dataclass(frozen=True)
class Observed:
    """A checked observation, in which lone surrogates are replaced by U+FFFD.

    Args:
        text: readable text of the observation.
        images: images, uint8 [height, width, 3], RGB, in order.
        messages: the environment's own messages; empty if the trainer writes the message.
        mended: whether there were lone surrogates.
        call: new messages and settings of an agent's next call, or None if the environment keeps no history.
    """

    text: str
    images: tuple[np.ndarray, ...] = field(default=(), compare=False)
    messages: OwnMessages = ()
    mended: bool = False
    call: Mapping[str, Any] | None = None


def read_observation(observation: Any) -> Observed:
    """Check an observation: a text, a text with images, or messages.

    Images are copied, since environments may draw into the same array.

    Raises:
        EnvError: the observation has another form.
    """
    shown = {"text": observation} if isinstance(observation, str) else observation
    if isinstance(observation, Mapping) and set(observation) == {"call"}:
        return _read_call(observation["call"])
    if isinstance(shown, Mapping) and set(shown) == {"messages"}:
        return _read_messages(shown["messages"])
    if not isinstance(shown, Mapping) or not set(shown) <= {"text", "images"}:
        raise contract_error(
            f"the environment gave {with_type('an observation', shown)}; observations must be text, or a dictionary of "
            "'text' and 'images', or of 'messages' alone (wrap the environment)"
        )
    text, images = shown.get("text", ""), shown.get("images", ())
    if not isinstance(text, str):
        raise contract_error(f"the environment gave {with_type('the text of an observation', text)}; it must be text")
    if not isinstance(images, list | tuple):
        raise contract_error(
            f"the environment gave {with_type('the images of an observation', images)}; they must be a list of arrays"
        )
    sound = well_formed(text)
    return Observed(sound, tuple(map(_image, images)), mended=sound != text)


def _read_messages(given: Any) -> Observed:
    if not isinstance(given, list | tuple) or not given:
        raise contract_error(
            f"the environment gave {with_type('messages', given)}; they must be a list of at least one, such as "
            "[{'role': 'user', 'content': 'Where to?'}]"
        )
    images: list[np.ndarray] = []
    messages: list[tuple[str, tuple[str | None, ...]]] = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise contract_error(f"the environment gave message {number} without exactly the keys 'role' and 'content'")
        role = message["role"]
        if not isinstance(role, str) or role not in ROLES:
            raise contract_error(
                f"the environment gave message {number} the role {in_short(role)}; a role is one of {', '.join(ROLES)} "
                "(rules of the game are the attribute `system_prompt`)"
            )
        messages.append((str.__str__(role), _parts(message["content"], images, number)))
    if messages[-1][0] == "assistant":
        raise contract_error("the last message of an environment is one that the policy replies to, not an assistant's")
    sound = tuple((role, tuple(part and well_formed(part) for part in parts)) for role, parts in messages)
    texts = ["".join("[image]" if part is None else part for part in parts) for _, parts in sound]
    if len(sound) > 1 or sound[0][0] != "user":
        texts = [f"{role}: {text}" for (role, _), text in zip(sound, texts, strict=True)]
    return Observed("\n\n".join(texts), tuple(images), sound, mended=sound != tuple(messages))


def _parts(content: Any, images: list[np.ndarray], number: int) -> tuple[str | None, ...]:
    """Return the parts of a message with adjacent texts joined, and append its images to ``images``."""
    parts: list[str | None] = []
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for item in items if isinstance(items, list | tuple) else [None]:
        match item:
            case {"type": "image", "image": image}:
                images.append(_image(image))
                parts.append(None)
            case {"type": "text", "text": str(text)}:
                before = parts.pop() or "" if parts and parts[-1] is not None else ""
                parts.append(f"{before}{text}")
            case _:
                raise contract_error(
                    f"the content of message {number} of the environment is {in_short(content)}; it must be a text, or "
                    "a list of {'type': 'text', 'text': ...} and {'type': 'image', 'image': array}"
                )
    return tuple(parts)


def _image(image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray):
        raise contract_error(f"the environment gave {with_type('an image', image)}; it must be a numpy array")
    if not is_image(image):
        raise contract_error(
            f"the environment gave an image of {image.dtype} {list(image.shape)}; images must be uint8 "
            "[height, width, 3], RGB, with at least one pixel"
        )
    return image.copy()


def is_image(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0


def fingerprint_of(text: str, images: Sequence[np.ndarray]) -> str:
    """Return a text that identifies an observation: its text, and a hash of each image."""
    hashes = (blake2b(f"{one.shape}".encode() + one.tobytes(), digest_size=16).hexdigest() for one in images)
    return "\n".join([text, *(f"image {digest}" for digest in hashes)])


def read_reward(value: Any) -> float:
    """Return the reward of a step.

    Raises:
        EnvError: the reward is not a number, or not finite.
    """
    try:
        if isinstance(value, str):  # float() would parse a string
            raise TypeError
        return finite_reward("the environment", value)
    except (TypeError, ValueError):
        raise contract_error(f"the environment gave {with_type('a reward', value)}; it must be a number") from None


def finite_reward(whose: str, number: SupportsFloat) -> float:
    """Return a reward as a float, after checking that it is finite in float32.

    Args:
        whose: origin of the reward, as the subject of the error message.
        number: reward to check.

    Raises:
        EnvError: the reward is not finite; the kind of the error is ``reward``.
    """
    try:
        reward = float(number)
    except OverflowError:  # an integer beyond the range of floats
        reward = math.inf
    if not abs(reward) <= LARGEST_REWARD:
        sentence = f"{whose} gave the reward {reward:g}; a reward must be finite, {LARGEST_REWARD:g} at most"
        raise EnvError(REWARD, sentence)
    return reward


def read_flag(what: str, value: Any) -> bool:
    """Return a flag of an environment as a bool. The flag may be Python's or numpy's bool, or an integer 0 or 1.

    Args:
        what: name of the flag, for the message.
        value: value to check.

    Raises:
        EnvError: the value is neither a bool nor 0 or 1.
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1)):
        return bool(value)
    raise contract_error(f"the environment gave {what} = {in_short(value)}; it must be true or false")


def read_info(info: Any) -> tuple[dict[str, str], dict[str, float]]:
    """Return the texts of an info dictionary, and the numbers in its ``progression`` and ``metrics``.

    Entries with other names are not checked.

    Raises:
        EnvError: an entry has a wrong type.
    """
    if not isinstance(info, Mapping):
        raise contract_error(f"the environment gave {with_type('an info', info)}; it must be a dictionary")
    texts = {name: info[name] for name in INFO_TEXTS if name in info}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise contract_error(f"the environment gave {with_type(f'an info[{name!r}]', text)}; it must be text")
    for name in INFO_FLAGS:
        if info.get(name) is not None:
            read_flag(f"info[{name!r}]", info[name])
    return texts, read_metrics(info)


def read_metrics(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in ``info["progression"]`` and ``info["metrics"]``.

    Raises:
        EnvError: the entries are not numbers by name, or a name is reserved for the trainer's metrics.
    """
    numbers: dict[str, float] = {}
    for entry, needed in (("progression", "a number"), ("metrics", "a dictionary of names and numbers")):
        if entry not in info:
            continue
        given = info[entry] if entry == "metrics" else {entry: info[entry]}
        try:
            numbers |= {well_formed(str(name)): float(value) for name, value in given.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise contract_error(
                f"the environment reports info['{entry}'] = {in_short(info[entry])}, which must be {needed}"
            ) from None
    for name in numbers:
        if name in _OUR_METRICS or name.startswith(_OUR_PREFIXES):
            raise contract_error(
                f"the environment reports '{name}' in info['metrics'], which is reserved for the trainer's metrics; "
                "choose another name"
            )
    return numbers


def well_formed(text: str) -> str:
    """Return the text as a plain str, with U+FFFD for each lone surrogate, which files and tokenizers refuse."""
    text = str.__str__(text)  # `rng.choice` returns numpy's str type, which checkpoints cannot contain
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_type(what: str, value: Any) -> str:
    return f"{what} of type {type(value).__name__}"


def in_short(value: Any) -> str:
    """Return the value's repr, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers with thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def contract_error(sentence: str) -> EnvError:
    return EnvError(CONTRACT, sentence)


def _read_call(call: Mapping[str, Any]) -> Observed:
    """Return the observation of an agent's call; for its messages see :mod:`lightning_agentrl.prompts.conversation`."""
    texts = [
        f"{message['role']}: " + "".join("[image]" if part is None else part for part in message["content"])
        for message in call["messages"]
    ]
    rest = {name: value for name, value in call.items() if name != "images"}
    return Observed("\n\n".join(texts), tuple(call.get("images", ())), call=rest)
