"""The wording and the limits of prompts, as a config gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_agentrl.errors.names import closest
from lightning_agentrl.types import ModelInput

PLACES = ("mission", "actions", "tips")  # what a system text of the config may take from the environment


@dataclass(frozen=True)
class PromptFormat:
    """The wording and the limits of prompts.

    Args:
        think: ask for a THINK line before the ACTION line; otherwise a reply is the action alone.
        instruction: text that ends the current user message in place of the built-in one. ``{actions}`` in it stands
            for the names of the actions; an empty text omits the instruction.
        examples: show the worked examples of the environment.
        system: system message in place of the environment's; an empty text omits the message. In it ``{mission}``,
            ``{actions}`` and ``{tips}`` stand for what the environment says: the mission of the episode, the actions
            with their descriptions, and its hints.
        max_prompt_tokens: the most tokens of a rendered prompt, those of images included; the oldest history is dropped
            first.
        max_images: the most images of a prompt; None: no limit. The oldest history is dropped first.
    """

    think: bool = True
    instruction: str | None = None
    examples: bool = True
    system: str | None = None
    max_prompt_tokens: int = 1024
    max_images: int | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.max_images is not None and self.max_images < 0:
            raise ValueError(f"max_images must be at least 0 or null, got {self.max_images}")
        for name in re.findall(r"\{(\w+)\}", self.system or ""):
            if name not in PLACES and (meant := closest(name, PLACES, cutoff=0.85)):
                raise ValueError(
                    f"the system text has {{{name}}}, which stands for nothing; did you mean {{{meant}}}? (key "
                    "data.init_args.prompt.system)"
                )

    @property
    def places(self) -> list[str]:
        """What the system text takes from the environment."""
        return [name for name in PLACES if f"{{{name}}}" in (self.system or "")]

    def allows(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is within the limits."""
        few = self.max_images is None or len(prompt.images) <= self.max_images
        return few and len(prompt) <= self.max_prompt_tokens
