"""The server of agents, by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import openai
import pytest

from lightning_agentrl.gateway.conversation import Call, Pending, Refusal, Reply, Reward, ToolCall
from lightning_agentrl.gateway.server import Line, gateway

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = ToolCall("call_1", "look", '{"where": "left"}')


class Policy:
    """Answers every call of a line."""

    def __init__(self, line: Line, reply: Callable[[Call], Reply | Refusal], delay: float = 0.0) -> None:
        self.line, self.reply, self.delay = line, reply, delay
        self.calls: list[Pending] = []
        self.rewards: list[Reward] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            event = self.line.events.get()
            if isinstance(event, Reward):
                self.rewards.append(event)
                continue
            self.calls.append(event)
            time.sleep(self.delay)
            self.line.answer(event, self.reply(event.call))


@pytest.fixture
def line() -> Iterator[Line]:
    line = gateway().open()
    yield line
    line.close()


def client(line: Line, **settings: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{line.url}/v1", api_key="none", **settings)  # type: ignore[arg-type]


def ask(line: Line, text: str = "hello", **settings: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client(line, max_retries=0).chat.completions.create(model="m", messages=messages, **settings)  # type: ignore


def test_a_reply_reaches_the_client_as_it_was_sampled(line: Line) -> None:
    policy = Policy(line, lambda call: Reply(" ok\n", prompt_tokens=7, tokens=2))
    answer = ask(line, max_tokens=5, stop="x")
    assert answer.choices[0].message.content == " ok\n"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 2, 9)
    (asked,) = policy.calls
    assert (asked.call.max_tokens, asked.call.stop, asked.call.model) == (5, ("x",), "m")


def test_a_tool_call_is_read_by_the_client_also_from_a_stream(line: Line) -> None:
    Policy(line, lambda call: Reply("so", (CALL,), "tool_calls"))
    messages = [{"role": "user", "content": "hello"}]
    asked = {"model": "m", "messages": messages, "tools": [TOOL]}
    (call,) = client(line).chat.completions.create(**asked).choices[0].message.tool_calls or ()  # type: ignore
    assert (call.function.name, call.function.arguments) == ("look", '{"where": "left"}')
    with client(line).chat.completions.stream(**asked) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "so"
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == '{"where": "left"}'  # type: ignore[index]


def test_responses_are_read_by_the_client_and_continued_by_their_id(line: Line) -> None:
    policy = Policy(line, lambda call: Reply("so", (CALL,), "tool_calls"))
    tools = [{"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}]
    first = client(line).responses.create(model="m", input="hello", instructions="Be brief.", tools=tools)  # type: ignore
    assert first.output_text == "so"
    call = first.output[1]
    assert (call.name, call.arguments) == ("look", '{"where": "left"}')  # type: ignore[union-attr]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"}  # type: ignore[union-attr]
    following = {"model": "m", "previous_response_id": first.id, "input": [output], "instructions": "Be brief."}
    with client(line).responses.stream(**following, tools=tools) as stream:  # type: ignore[arg-type]
        assert stream.get_final_response().output_text == "so"
    roles = [message.role for message in policy.calls[1].call.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assert (
        policy.calls[1].call.beginnings[3].digest
        == policy.calls[0].call.beginnings[2].then(Reply("so", (CALL,)).message).digest
    )


def test_a_client_that_is_less_patient_than_the_policy_gets_its_reply(line: Line) -> None:
    policy = Policy(line, lambda call: Reply("late"), delay=3.0)
    assert ask(line, timeout=2.0).choices[0].message.content == "late"
    with client(line, timeout=2.0, max_retries=0).chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "again"}]
    ) as stream:
        assert stream.get_final_completion().choices[0].message.content == "late"
    assert len(policy.calls) == 2


def test_a_client_that_retries_joins_its_own_call(line: Line) -> None:
    policy = Policy(line, lambda call: Reply("once"), delay=1.0)
    impatient = client(line, timeout=0.5, max_retries=5)
    answer = impatient.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "once"
    assert len(policy.calls) == 1


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"n": 2}, "n is 2"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "must be an integer"),
    ],
)
def test_what_cannot_be_had_is_refused_once(line: Line, asked: dict, what: str) -> None:
    policy = Policy(line, lambda call: Reply("no"))
    with pytest.raises(openai.BadRequestError, match=what):
        client(line).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], **asked)
    assert not policy.calls


def test_a_refusal_of_the_policy_has_its_sentence(line: Line) -> None:
    policy = Policy(line, lambda call: Refusal("the prompt has 9 tokens, and 8 fit"))
    with pytest.raises(openai.BadRequestError, match="and 8 fit"):
        ask(line)
    assert len(policy.calls) == 1


def test_a_second_call_waits_for_its_turn_or_is_refused() -> None:
    alone = gateway().open(parallel=False)
    Policy(alone, lambda call: Reply("ok"), delay=0.5)
    first = threading.Thread(target=ask, args=(alone,))
    first.start()
    time.sleep(0.2)
    with pytest.raises(openai.BadRequestError, match="parallel"):
        ask(alone, "another")
    first.join()
    assert ask(alone, "another").choices[0].message.content == "ok"
    alone.close()


def test_a_line_that_is_over_and_strangers_are_refused(line: Line) -> None:
    over = gateway().open()
    over.close()
    with pytest.raises(openai.APIStatusError) as refused:
        ask(over)
    assert refused.value.status_code == 410
    for headers in ({"Origin": "http://127.0.0.1"}, {"Host": "example.org"}):
        with pytest.raises(openai.PermissionDeniedError):
            ask(line, extra_headers=headers)


def test_a_body_that_is_too_large_is_refused(line: Line) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(line, "x" * (33 * 2**20))
    assert refused.value.status_code == 413


def test_a_reward_names_its_call(line: Line) -> None:
    policy = Policy(line, lambda call: Reply("ok"))
    answer = ask(line)
    http = client(line)
    http.post("/reward", body={"reward": 0.5, "id": answer.id}, cast_to=object)
    http.post("/reward", body={"reward": 1}, cast_to=object)
    ask(line, "after")
    assert policy.rewards == [Reward(0.5, policy.calls[0].id), Reward(1.0, "")]


def test_the_models_can_be_listed(line: Line) -> None:
    assert [model.id for model in client(line).models.list()] == ["policy"]
