"""Random conversations of an agent with sub-agents that edits what was said: what is read before each reply."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.episodes.agent_env import observation_of
from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.episode import Episode, Said, make_prompt
from lightning_agentrl.gateway.conversation import Call, ChatMessage, Reply
from lightning_agentrl.gateway.conversation import Episode as Calls
from lightning_agentrl.prompts.conversation import conversations_of
from lightning_agentrl.prompts.memory import FullMemory
from lightning_agentrl.prompts.messages import Observation, PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import ModelInput, Segment, SegmentKind
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = ChatRenderer(TOKENIZER, PromptFormat(max_prompt_tokens=100_000)).free_text
WORDS = [  # tokens of plain text, blanks at their ends included
    i for i in range(3, len(TOKENIZER)) if TOKENIZER.decode([i]).isascii() and TOKENIZER.decode([i]).isprintable()
]
EDITS = ("none", "none", "none", "strip", "drop", "insert", "swap", "compact")
texts = st.text("ab c.\n", min_size=1, max_size=12)


@dataclass
class Talk:
    """One conversation of the agent: its messages, and whether they are what was asked and replied."""

    messages: list[ChatMessage]
    last: int | None = None  # turn of the last reply
    read: tuple[int, ...] = ()  # all ids up to and with that reply


@dataclass
class Agent:
    calls: Calls = field(default_factory=Calls)
    episode: Episode = field(default_factory=lambda: Episode(0, 0))

    def ask(self, messages: list[ChatMessage], reply: list[int], closed: bool) -> tuple[Any, tuple[int, ...], str]:
        """Make a call; return its prompt, all ids up to the end of the reply, and the reply as the client has it."""
        call = Call(tuple(messages))
        asked: dict[str, Any] = observation_of(call, self.calls.place(call))["call"]
        shown = Observation("", call={name: value for name, value in asked.items() if name != "images"})
        prompt = make_prompt(self.episode, shown, Contract(free_text=True), CHAT, FullMemory())
        ids = (*reply, CHAT.template.turn_close_id) if closed else tuple(reply)
        segment = Segment(SegmentKind.ACTION, ModelInput.of_ids(ids), (0.0,) * len(ids))
        said = conversations_of(CHAT).reply(ids, len(prompt.input), asked, (), len(self.episode.said))
        self.calls.add(call, Reply(said.text))
        context = list(self.episode.conversation(asked["follows"])) if prompt.follows is None else []
        earlier = [message for one in context for message in one.messages]
        record = Said(prompt.follows, (*earlier, *asked["messages"], said.message), (), (*prompt.new, segment), closed)
        self.episode.said.append(record)
        return prompt, (*prompt.input.ids, *ids), said.text


def edited(draw: st.DrawFn, talk: Talk) -> tuple[str, list[ChatMessage]]:
    """Return the messages of the next call, in which something earlier may have been changed."""
    edit, messages = draw(st.sampled_from(EDITS)), list(talk.messages)
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not replies:
        return "none", messages
    at = draw(st.sampled_from(replies))
    match edit:
        case "strip":
            if messages[at].text == messages[at].text.strip():
                return "none", messages
            messages[at] = replace(messages[at], parts=(messages[at].text.strip(),))
        case "drop":
            del messages[at : at + 2]
        case "insert":
            messages.insert(at + 1, ChatMessage("user", (draw(texts),)))
        case "swap":
            if at + 2 >= len(messages) or messages[at] == messages[at + 2]:
                return "none", messages
            messages[at], messages[at + 2] = messages[at + 2], messages[at]
        case "compact":
            messages = [messages[0], ChatMessage("user", (draw(texts),))]
    return edit, messages if messages[-1].role == "user" else [*messages, ChatMessage("user", (draw(texts),))]


@settings(max_examples=150)
@given(st.data())
def test_unedited_calls_go_on_with_the_sampled_ids_and_edited_ones_read_what_was_sent(data: st.DataObject) -> None:
    draw: Any = data.draw
    agent = Agent()
    talks = [Talk([ChatMessage("system", (f"agent {i}",)), ChatMessage("user", (draw(texts),))]) for i in range(3)]
    for _ in range(draw(st.integers(2, 14))):
        talk = draw(st.sampled_from(talks))
        edit, messages = edited(draw, talk)
        reply = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6))
        closed = draw(st.booleans())
        prompt, read, text = agent.ask(messages, reply, closed)
        if edit == "none" and talk.last is not None:
            assert prompt.follows == talk.last
            assert prompt.input.ids[: len(talk.read)] == talk.read
        sent = [{"role": one.role, "content": one.text} for one in messages]
        expected = TOKENIZER.apply_chat_template(sent, add_generation_prompt=True, tokenize=False)
        assert TOKENIZER.decode(prompt.input.ids) == expected, edit
        talk.messages = [*messages, ChatMessage("assistant", (text,)), ChatMessage("user", (draw(texts),))]
        talk.last, talk.read = len(agent.episode.said) - 1, read


def test_replies_that_are_no_whole_text_go_on_with_their_ids() -> None:
    agent = Agent()
    broken = [i for i in range(3, len(TOKENIZER)) if "\ufffd" in TOKENIZER.decode([i])][:3]
    messages = [ChatMessage("user", ("a",))]
    _, read, text = agent.ask(messages, broken, closed=False)
    messages = [*messages, ChatMessage("assistant", (text,)), ChatMessage("user", ("b",))]
    prompt, _, _ = agent.ask(messages, [5], closed=True)
    assert prompt.input.ids[: len(read)] == read
