"""An agent of more than 30 calls that has its history summarized now and then, and goes on with the summary."""

import json
import os

from openai import OpenAI

RULES = "Repeat the number of each message, and nothing else."
EXAMPLES = [  # what is wanted, once for a message and once for a summary
    {"role": "user", "content": "41"},
    {"role": "assistant", "content": "41"},
    {"role": "user", "content": "Which number was last?"},
    {"role": "assistant", "content": "41"},
]
KEPT = 8  # messages of the history, after which it is summarized
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def ask(messages):
    """Return the model's reply."""
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return reply.choices[0].message.content


history, right, asked = [], 0, 0
for number in json.loads(os.environ["AGENTRL_TASK"])["numbers"]:
    start = [{"role": "system", "content": RULES}, *EXAMPLES]
    if len(history) >= 2 * KEPT:
        summary = ask([*start, *history, {"role": "user", "content": "Which number was last?"}])
        right, asked = right + (summary.strip() == history[-2]["content"]), asked + 1
        history = [{"role": "user", "content": summary.strip() or "0"}, {"role": "assistant", "content": "noted"}]
    history.append({"role": "user", "content": str(number)})
    said = ask([*start, *history])
    right, asked = right + (said.strip() == str(number)), asked + 1
    history.append({"role": "assistant", "content": said})
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": right / asked}, file)
