"""What a small model needs to know of an environment to be trained on it, read off the episodes of an exam."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from lightning_agentrl.tools.check_env.seen import Play
from lightning_agentrl.tools.check_env.texts import words

_WORDS = 1500  # of its vocabulary


def texts(random: Sequence[Play], solved: Sequence[Play], named: bool) -> dict[str, Any]:
    """Return what a small model needs to know of the environment's texts, and what random replies earn.

    Args:
        random: random episodes.
        solved: those of the scripted player.
        named: whether the environment names its actions.
    """
    seen = [one for play in [*random, *solved] if not play.broken for one in play.seen]
    system = system_of({(one.contract.system_prompt, one.contract.mission) for one in seen})
    read = [one.prompt if system is None else f"{one.contract.mission if system else ''}\n{one.text}" for one in seen]
    return {
        "words": [word for word, _ in Counter(word for text in read for word in words(text)).most_common(_WORDS)],
        "replies": list(dict.fromkeys(reply for one in seen[:200] for reply in one.legal())),
        "named": named,
        "system": system,
        "longest": max((len(words(text)) for text in read), default=0),
        "returns": [play.total for play in random if not play.broken],
    }


def system_of(said: Collection[tuple[str, str]]) -> str | None:
    """Return the system text for a small model, as `PromptFormat` takes it, without what is the same in all episodes.

    Args:
        said: system prompts of an environment, each with the mission of its episode.

    Returns:
        An empty text if they are all alike, ``{mission}`` if they differ in the mission alone, else None, for all.
    """
    if len({prompt for prompt, _ in said}) < 2:
        return ""
    rest = {prompt.replace(mission, "{mission}") if mission else prompt for prompt, mission in said}
    return "{mission}" if len(rest) == 1 else None
