"""Which earlier turn a call goes on from."""

from __future__ import annotations

import random
from dataclasses import replace

from lightning_agentrl.gateway.conversation import Call, ChatMessage, Episode, Reply, ToolCall


def user(text: str) -> ChatMessage:
    return ChatMessage("user", (text,))


def tool(text: str, answers: str) -> ChatMessage:
    return ChatMessage("tool", (text,), answers=answers)


def test_a_call_goes_on_from_the_reply_that_it_sends_back() -> None:
    episode, first = Episode(), Call((user("a"),))
    assert episode.place(first).follows is None
    reply = Reply("b")
    episode.add(first, reply)
    place = episode.place(Call((user("a"), reply.message, user("c"))))
    assert (place.follows, place.known) == (0, 2)


def test_what_the_client_changed_goes_on_from_the_last_reply_that_is_untouched() -> None:
    episode = Episode()
    messages: tuple[ChatMessage, ...] = (user("0"),)
    for number in range(4):
        call, reply = Call(messages), Reply(f" said {number} ")
        episode.place(call)
        episode.add(call, reply)
        messages = (*messages, reply.message, user(str(number + 1)))
    stripped = list(messages)
    stripped[5] = ChatMessage("assistant", ("said 2",))
    place = episode.place(Call(tuple(stripped)))
    assert (place.follows, place.known) == (1, 4)
    assert episode.place(Call((user("summary"), *messages[3:]))).follows is None
    assert episode.place(Call(messages, tools=({"type": "function", "function": {"name": "f"}},))).follows is None


def test_ids_blanks_in_arguments_and_the_parts_of_a_text_do_not_count() -> None:
    episode, first = Episode(), Call((user("a"),))
    calls = (ToolCall("x", "f", '{"a":1,"b":2}'), ToolCall("y", "f", "{}"))
    episode.add(first, Reply("so", calls, "tool_calls"))
    sent = ChatMessage("assistant", ("s", "o"), (ToolCall("1", "f", '{"b": 2, "a": 1}'), ToolCall("2", "f", "{}")))
    again = Call((user("a"), sent, tool("one", "1"), tool("two", "2")))
    assert episode.place(again).follows == 0
    swapped = Call((user("a"), sent, tool("one", "2"), tool("two", "1")))
    assert again.digest != swapped.digest


def test_equal_calls_are_counted() -> None:
    episode, call = Episode(), Call((user("a"),))
    assert [episode.place(call).occurrence for _ in range(3)] == [0, 1, 2]
    assert episode.place(replace(call, max_tokens=3)).occurrence == 0
    assert episode.place(replace(call, model="other")).occurrence == 3


def test_unedited_calls_of_interleaved_conversations_follow_their_own_last_turn() -> None:
    """Three conversations, of which two begin alike until their replies differ."""
    draw = random.Random(0)
    episode = Episode()
    talks: list[tuple[tuple[ChatMessage, ...], int | None]] = [((user("a"),), None), ((user("a"),), None)]
    talks.append(((ChatMessage("system", ("other",)), user("a")), None))
    for number in range(300):
        which = draw.randrange(3)
        messages, last = talks[which]
        call, reply = Call(messages), Reply(f"reply {number}")
        place = episode.place(call)
        assert place.follows == last
        assert place.known == (0 if last is None else len(messages) - 1)
        turn = episode.add(call, reply)
        talks[which] = ((*messages, reply.message, user(draw.choice("abc"))), turn)
