"""An agent that answers with the help of a tool, with the client of OpenAI; it knows nothing of training."""

import json
import os

from openai import OpenAI

from agentrl_envs.tool_use.env import calculate

TOOL = {
    "name": "calculate",
    "description": "Calculate an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def called(expression, name):
    """Return the message of a call."""
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def answer(call):
    """Return the message with what the tool says to a call."""
    try:
        said = calculate(**json.loads(call.function.arguments))
    except (ValueError, TypeError, ZeroDivisionError, SyntaxError) as error:
        said = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": str(said)}


messages = [{"role": "system", "content": "Answer with the number alone. Use the tool."}]
for expression, value in (("31 * 7", "217"), ("58 + 64", "122"), ("90 - 13", "77")):  # solved tasks show what is wanted
    messages += [
        {"role": "user", "content": expression},
        called(expression, "example00"),
        {"role": "tool", "tool_call_id": "example00", "content": value},
        {"role": "assistant", "content": value},
    ]
messages.append({"role": "user", "content": json.loads(os.environ["AGENTRL_TASK"])["expression"]})
for _ in range(3):
    reply = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}], max_tokens=40
    )
    message = reply.choices[0].message
    if not message.tool_calls:
        break
    messages += [message, *map(answer, message.tool_calls)]
