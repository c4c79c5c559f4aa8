"""The guessing game as a script with a loop of its own, a helper with another prompt, and compaction; no package."""

import json
import os
import random
import sys
from urllib import request

style = sys.argv[1] if len(sys.argv) > 1 else "plain"


def ask(messages, **more):
    body = json.dumps({"model": more.pop("model", "player"), "messages": messages, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with request.urlopen(request.Request(url, body)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


seed = int(os.environ["AGENTRL_SEED"])
draw = random.Random(seed)
secret, won = draw.randint(1, 9), False
messages = [
    {"role": "system", "content": "Guess a number from 1 to 9."},
    user(json.loads(os.environ["AGENTRL_TASK"])["hint"]),
]
for turn in range(2 + seed % 5):
    reply = ask(messages, max_tokens=6)
    messages.append({"role": "assistant", "content": reply})
    number = sum(map(ord, reply)) % 9 + 1
    won = won or number == secret
    if won:
        break
    if style == "mixed" and turn % 2:
        advice = ask(
            [{"role": "system", "content": "You advise."}, user(f"Too {'low' if number < secret else 'high'}?")],
            model="adviser",
        )
        messages.append(user(f"Advice: {advice}"))
    else:
        messages.append(user("too low" if number < secret else "too high"))
    if style == "mixed" and len(messages) > 6:  # compaction
        messages = [messages[0], user(f"So far: {number}.")]
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(won)}, file)
