"""A loop of one's own on the client of Anthropic."""

import json
import os
import random

import anthropic

secret = random.Random(os.environ["AGENTRL_SEED"]).randint(1, 9)
client = anthropic.Anthropic()
schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
tools = [{"name": "guess", "description": "Guess the number.", "input_schema": schema}]
messages = [{"role": "user", "content": "Find a number from 1 to 9 with the tool."}]
won = False
for _ in range(5):
    with client.messages.stream(
        model="policy", max_tokens=64, system="You guess.", tools=tools, messages=messages
    ) as stream:
        reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    uses = [block for block in reply.content if block.type == "tool_use"]
    if not uses:
        break
    results = []
    for use in uses:
        number = use.input.get("number", 0)
        won = won or number == secret
        said = "right" if number == secret else "too low" if number < secret else "too high"
        results.append({"type": "tool_result", "tool_use_id": use.id, "content": said})
    messages.append({"role": "user", "content": results})
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(won)}, file)
