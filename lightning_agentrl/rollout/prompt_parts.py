"""How many tokens each part of a prompt takes."""

from __future__ import annotations

from lightning_agentrl.rollout.chat import ChatRenderer, Message
from lightning_agentrl.rollout.session import Session


def prompt_parts(session: Session, renderer: ChatRenderer) -> dict[str, int]:
    """Tokens of system text, worked examples, history, and the current message with all headers; in sum the prompt.

    A part is what the prompt shrinks by without it, since a template may refuse a conversation that lacks more.
    """
    parts = renderer.messages(
        session.system_prompt,
        session.examples,
        session.memory.recall(session.past),
        session.observation,
        session.short_term,
        session.actions,
    )

    def tokens(system: list[Message], without: str = "") -> int:
        others = [m for name in ("examples", "history", "current") if name != without for m in parts[name]]
        return renderer.count_tokens(system + others, reply_follows=True)

    whole = tokens(parts["system"])
    counts = {"system": whole - tokens([{**message, "content": ""} for message in parts["system"]])}
    counts |= {name: whole - tokens(parts["system"], name) for name in ("examples", "history")}
    return {**counts, "current": whole - sum(counts.values())}
