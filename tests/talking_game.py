"""A game that speaks in messages of its own: a question, tools that answer with pictures, a line it puts in between."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.seen_game import Corner


class Talk(Corner):
    """The game of `Corner`, told in messages.

    Args:
        tools_from: number of the turn from which on tools answer; before it there is a user's message only.
        settings: of `Corner`.
    """

    def __init__(self, tools_from: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.tools_from = tools_from
        self.observation_space = Conversation()

    def _look(self) -> Any:
        seen = super()._look()
        if isinstance(seen, str):
            seen = {"text": seen, "images": []}
        pictures = [{"type": "image", "image": image} for image in seen["images"]]
        looks = [{"type": "text", "text": "Look: "}, *pictures, {"type": "text", "text": seen["text"]}]
        if self.count < self.tools_from:
            return {"messages": [{"role": "user", "content": looks}]}
        messages = [{"role": "tool", "content": "The last one is gone."}, {"role": "tool", "content": looks}]
        return {"messages": [*messages, {"role": "user", "content": "Go on."}]}


class Conversation(spaces.Space[Any]):
    """Lists of messages; what they hold is checked by whoever reads them."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, dict) and isinstance(x.get("messages"), list)

    def __repr__(self) -> str:
        return "Conversation()"


class Saying(Talk):
    """Says what it is given, in every turn."""

    def __init__(self, messages: Any) -> None:
        super().__init__()
        self.said = messages

    def _look(self) -> Any:
        super()._look()
        return {"messages": self.said}


gymnasium.register("Talk-v0", entry_point=Talk)
gymnasium.register("Saying-v0", entry_point=Saying)
GREY = np.full((48, 48, 3), 100, dtype=np.uint8)
