"""What an environment shows: a text, a text with images, or messages of its own. Read and checked in one place.

The processes of environments import this file, so it imports nothing but numpy and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from lightning_agentrl.episodes.contract import contract_error, in_short, plain_text, well_formed

# As in prompts/memory.py, which a process of an environment does not load.
OwnMessages = tuple[tuple[str, tuple[str | None, ...]], ...]
"""Of each message its role and, in order, its texts; None stands for the next image of the observation."""

ROLES = ("user", "tool", "assistant")


@dataclass(frozen=True)
class Observed:
    """An observation as it was read.

    Args:
        text: what people read of it.
        images: uint8 [height, width, 3], RGB, in the order in which they are shown.
        messages: of the environment's own; empty where it leaves them to the trainer.
    """

    text: str
    images: tuple[np.ndarray, ...] = field(default=(), compare=False)
    messages: OwnMessages = ()

    def mended(self) -> Observed:
        """Return it with U+FFFD for each lone surrogate."""
        if not self.messages and self.text.isascii():
            return self
        messages = tuple((role, tuple(part and well_formed(part) for part in parts)) for role, parts in self.messages)
        return replace(self, text=well_formed(self.text), messages=messages)


def read_observation(observation: Any) -> Observed:
    """Return what an environment shows. Images are copied, since environments may draw into the same array.

    Raises:
        EnvError: it is neither text, nor a dictionary of text and images, nor one of messages.
    """
    if isinstance(observation, str):
        return Observed(plain_text(observation))
    if isinstance(observation, Mapping) and set(observation) == {"messages"}:
        return _of_messages(observation["messages"])
    if not isinstance(observation, Mapping) or not set(observation) <= {"text", "images"}:
        raise contract_error(
            f"the environment gave {with_type('an observation', observation)}; observations must be text, or a "
            "dictionary of 'text' and 'images', or of 'messages' alone (wrap the environment)"
        )
    text, images = observation.get("text", ""), observation.get("images", ())
    if not isinstance(text, str):
        raise contract_error(f"the environment gave {with_type('the text of an observation', text)}; it must be text")
    if not isinstance(images, list | tuple):
        raise contract_error(
            f"the environment gave {with_type('the images of an observation', images)}; they must be a list of arrays"
        )
    return Observed(plain_text(text), tuple(_image(one) for one in images))


def fingerprint_of(text: str, images: Sequence[np.ndarray]) -> str:
    """Return a text that is equal where an observation is equal: its own, and a hash of each image."""
    hashes = (blake2b(f"{one.shape}".encode() + one.tobytes(), digest_size=16).hexdigest() for one in images)
    return "\n".join([text, *(f"image {digest}" for digest in hashes)])


def is_image(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0


def with_type(what: str, value: Any) -> str:
    return f"{what} of type {type(value).__name__}"


def _image(image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray):
        raise contract_error(f"the environment gave {with_type('an image', image)}; it must be a numpy array")
    if not is_image(image):
        raise contract_error(
            f"the environment gave an image of {image.dtype} {list(image.shape)}; images must be uint8 "
            "[height, width, 3], RGB, with at least one pixel"
        )
    return image.copy()


def _of_messages(given: Any) -> Observed:
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
        messages.append((plain_text(role), _parts(message["content"], images, number)))
    if messages[-1][0] == "assistant":
        raise contract_error("the last message of an environment is one that the policy replies to, not an assistant's")
    return Observed(_text_of(messages), tuple(images), tuple(messages))


def _parts(content: Any, images: list[np.ndarray], number: int) -> tuple[str | None, ...]:
    """Return the parts of a message, no two texts next to each other; its images are added to the list."""
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[str | None] = []
    for given in items if isinstance(items, list | tuple) else [None]:
        item = dict(given) if isinstance(given, Mapping) else {}
        if item.keys() == {"type", "image"} and item["type"] == "image":
            images.append(_image(item["image"]))
            parts.append(None)
        elif item.keys() == {"type", "text"} and item["type"] == "text" and isinstance(item["text"], str):
            before = parts.pop() or "" if parts and parts[-1] is not None else ""
            parts.append(f"{before}{item['text']}")
        else:
            raise contract_error(
                f"the content of message {number} of the environment is {in_short(content)}; it must be a text, or a "
                "list of {'type': 'text', 'text': ...} and {'type': 'image', 'image': array}"
            )
    return tuple(parts)


def _text_of(messages: Sequence[tuple[str, tuple[str | None, ...]]]) -> str:
    """Return messages as people read them; a single one of the user without its role."""
    texts = ["".join("[image]" if part is None else part for part in parts) for _, parts in messages]
    if [role for role, _ in messages] == ["user"]:
        return texts[0]
    return "\n\n".join(f"{role}: {text}" for (role, _), text in zip(messages, texts, strict=True))
