"""How many tokens each part of a prompt takes."""

from __future__ import annotations

from lightning_agentrl.rollout.chat import ChatRenderer
from lightning_agentrl.rollout.session import Session


def prompt_parts(session: Session, renderer: ChatRenderer) -> dict[str, int]:
    """Tokens of system text, worked examples, history and current message (with the header of the reply).

    A part is what the prompt grows by when it is added, so their sum is the prompt.
    """
    recollection = session.memory.recall(session.past)
    parts = renderer.messages(
        session.system_prompt,
        session.examples,
        recollection,
        session.observation,
        session.short_term,
        session.actions,
    )
    counts, messages, before = {}, [], 0
    for name, part in parts.items():
        messages += part
        if not part:
            continue
        tokens = renderer.count_tokens(messages, reply_follows=name == "current")
        counts[name], before = tokens - before, tokens
    return counts
