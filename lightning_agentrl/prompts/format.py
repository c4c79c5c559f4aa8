"""The wording and the limits of prompts, as a config gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_agentrl.types import ModelInput

PLACES = ("mission", "actions", "tips")  # what a system text of the config may take from the environment
INSTRUCTION_PLACES = ("actions",)
_BRACES = re.compile(r"\{\{|\}\}|\{(\w+)\}|\{[^{}\n]{0,40}\}?|\}")  # the last two are mistakes


@dataclass(frozen=True)
class PromptFormat:
    """The wording and the limits of prompts.

    Args:
        think: ask for a THINK line before the ACTION line; otherwise a reply is the action alone.
        instruction: text that ends the current user message in place of the built-in one. ``{actions}`` in it stands
            for the names of the actions, and ``{{`` and ``}}`` for braces; an empty text omits the instruction.
        examples: show the worked examples of the environment.
        system: system message in place of the environment's; an empty text omits the message. In it ``{mission}``,
            ``{actions}`` and ``{tips}`` stand for what the environment says: the mission of the episode, the actions
            with their descriptions, and its hints; ``{{`` and ``}}`` stand for braces.
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
        _check_places("system", self.system or "", PLACES)
        _check_places("instruction", self.instruction or "", INSTRUCTION_PLACES)

    @property
    def places(self) -> list[str]:
        """What the system text takes from the environment."""
        named = {match[1] for match in _BRACES.finditer(self.system or "")}
        return [name for name in PLACES if name in named]

    def allows(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is within the limits."""
        few = self.max_images is None or len(prompt.images) <= self.max_images
        return few and len(prompt) <= self.max_prompt_tokens


def filled(text: str, places: Mapping[str, str]) -> str:
    """Return a text of the config with its places filled, by name, and ``{{`` and ``}}`` as single braces."""
    return _BRACES.sub(lambda match: places.get(match[1], "") if match[1] else match[0][0], text)


def _check_places(name: str, text: str, known: Sequence[str]) -> None:
    for match in _BRACES.finditer(text):
        if match[0] not in ("{{", "}}") and match[1] not in known:
            raise ValueError(
                f"the {name} text of the prompt has '{match[0]}', and what stands in braces must be one of "
                f"{', '.join(f'{{{place}}}' for place in known)}; write {{{{ and }}}} for literal braces (key "
                f"data.init_args.prompt.{name})"
            )
