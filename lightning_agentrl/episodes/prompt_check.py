"""Checks of prompts on a real first observation, and token counts of the parts of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.episode import make_prompt, rules_of
from lightning_agentrl.episodes.interaction import Interaction
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors import closest
from lightning_agentrl.prompts.conversation import conversations_of
from lightning_agentrl.prompts.memory import PastTurn
from lightning_agentrl.prompts.parser import RawParser
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import Message
from lightning_agentrl.types import ModelInput


def check_prompt(session: Session, interaction: Interaction, context_length: int) -> ModelInput:
    """Check that the prompts of a configuration can work; return the first prompt.

    Args:
        session: session of an environment, whose first episode this check begins.
        interaction: interaction of the run.
        context_length: number of tokens that the model can read.

    Raises:
        ValueError: the prompts cannot work; the message names what was given, what is needed and the key to change.
    """
    session.begin()
    form, memory, contract = session.renderer.format, session.memory, session.contract
    if form.max_prompt_tokens + interaction.max_reply_tokens > context_length:
        raise ValueError(
            f"prompts of up to {form.max_prompt_tokens} tokens and replies of up to {interaction.max_reply_tokens} do "
            f"not fit the model's context of {context_length} tokens; lower "
            "data.init_args.prompt.max_prompt_tokens or the interaction's max_reply_tokens"
        )
    raw = isinstance(interaction.parser, RawParser)
    if not (contract.actions or contract.free_text or raw):
        raise ValueError(
            "the environment names no actions (attribute `actions`), so replies cannot be matched with actions; add "
            "the attribute, or pass replies to it unchanged with RawParser (key data.init_args.interaction)"
        )
    if raw and form.think:
        raise ValueError(
            "RawParser passes the whole reply to the environment, so a reply must not contain a thought; set "
            "data.init_args.prompt.think to false"
        )
    template, tools = session.renderer.template, session.renderer.writer.tools(contract.tool_schemas)
    if session.observation.call is not None:
        conversations_of(session.renderer).check_tools(tools)
        first = session.prompt().input
        if len(first) > form.max_prompt_tokens:
            raise ValueError(
                f"the first call of the agent has {len(first)} tokens, over the limit of {form.max_prompt_tokens}; "
                "raise data.init_args.prompt.max_prompt_tokens or lower the interaction's max_reply_tokens"
            )
        return first
    if tools:
        template.check_tools(tools)
    if memory.grows and (rewrites := template.rewriting(tools, [contract.observation_role])):
        raise ValueError(
            f"{type(memory).__name__} needs a chat template that only appends, and {template.name} {rewrites}; use "
            "WindowMemory (key data.init_args.memory)"
        )
    check_places(form.places, contract)
    # This call raises if system text, observation and instruction alone exceed the limit.
    first = session.prompt().input
    seen = session.observation
    one = PastTurn(seen.text, "", contract.default_action, images=tuple(seen.images), messages=seen.messages)
    if (memory.longest or 0) > form.max_prompt_tokens and not contract.one_turn:  # a turn has at least one token
        raise ValueError(
            f"{type(memory).__name__} shows up to {memory.longest} turns, and a prompt has at most "
            f"{form.max_prompt_tokens} tokens; shorten the memory (key data.init_args.memory)"
        )
    fullest = [] if contract.one_turn else memory.fullest(one)
    if fullest:
        longest = replace(session.episode, past=fullest)
        cuts = make_prompt(longest, seen, contract, session.renderer, memory).history_cuts
        if cuts:
            shown = len(memory.recall(fullest).turns)
            images = "" if form.max_images is None else f" and {form.max_images} images"
            raise ValueError(
                f"{type(memory).__name__} shows up to {shown} turns, of which only {shown - cuts} fit into "
                f"prompts of {form.max_prompt_tokens} tokens{images} even without thoughts; shorten the memory "
                "(key data.init_args.memory) or raise data.init_args.prompt.max_prompt_tokens"
                f"{' or .max_images' if images else ''}"
            )
    return first


def check_places(places: Sequence[str], contract: Contract) -> None:
    """Check that the environment has a text for each placeholder of the system text.

    Args:
        places: names of the placeholders.
        contract: contract of the environment.

    Raises:
        ValueError: a text is missing; the message lists the existing ones.
    """
    offered = {**contract.places, "actions": contract.actions}
    for place in places:
        if offered.get(place) or place in contract.texts:  # an attribute of the environment may be empty at first
            continue
        known = dict.fromkeys([*(name for name, text in offered.items() if text), *contract.text_names])
        meant = closest(place, tuple(known))
        raise ValueError(
            f"the system text has the placeholder {{{place}}}, but the environment has no attribute `{place}`"
            f"{f'; did you mean {{{meant}}}?' if meant else ''}; it offers "
            f"{', '.join(f'{{{name}}}' for name in known) or 'no text'}. Change the text (key "
            "data.init_args.prompt.system), or give the environment the attribute"
        )


def prompt_parts(session: Session, renderer: ChatRenderer) -> dict[str, int]:
    """Return the number of tokens of system text, worked examples, history, and current message with all headers.

    The numbers add up to the length of the prompt. Each part is measured by rendering the prompt without it, since a
    chat template may refuse a conversation without several parts.
    """
    rules = rules_of(session.contract)
    parts = renderer.writer.parts(rules, session.observation, session.memory.recall(session.episode.past))

    def tokens(system: list[Message], without: str = "") -> int:
        others = [m for name in ("examples", "history", "current") if name != without for m in parts[name]]
        return renderer.count_tokens(system + others, reply_follows=True, tools=rules.tools)

    whole = tokens(parts["system"])
    counts = {"system": whole - tokens([renderer.template.message("system", "")] if parts["system"] else [])}
    counts |= {name: whole - tokens(parts["system"], name) for name in ("examples", "history")}
    return {**counts, "current": whole - sum(counts.values())}
