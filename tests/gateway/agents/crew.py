"""The guessing game with three advisers, asked one after the other or at once, and compaction; no package.

Arguments: a folder in which each process leaves a file with its number, and `in_turn` or `at_once`.
"""

import json
import os
import random
import sys
import threading
from urllib import request

folder, style = sys.argv[1:]
open(os.path.join(folder, str(os.getpid())), "w").close()


def ask(messages, **more):
    body = json.dumps({"model": more.pop("model", "player"), "messages": messages, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with request.urlopen(request.Request(url, body)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


def advise(number, text):
    advice[number] = ask([{"role": "system", "content": f"You advise, {number}."}, user(text)], model="adviser")


seed = int(os.environ["AGENTRL_SEED"])
secret, won = random.Random(seed).randint(1, 9), False
rules = {"role": "system", "content": "Guess a number from 1 to 9."}
messages = [rules, user(json.loads(os.environ["AGENTRL_TASK"])["hint"])]
for _ in range(1 + seed % 4):
    reply = ask(messages, max_tokens=6)
    guess = sum(map(ord, reply)) % 9 + 1
    won = guess == secret
    if won:
        break
    advice = [""] * 3
    calls = [threading.Thread(target=advise, args=(i, f"Too {'low' if guess < secret else 'high'}?")) for i in range(3)]
    for call in calls:
        call.start()
        if style == "in_turn":
            call.join()
    for call in calls:
        call.join()
    messages += [{"role": "assistant", "content": reply}, user("Advice: " + " ".join(advice))]
    if len(messages) > 4:  # compaction
        messages = [rules, user(f"So far: {guess}.")]
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(won)}, file)
