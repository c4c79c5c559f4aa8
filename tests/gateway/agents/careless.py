"""Three calls, of which every tenth first times out, is retried, or loses its connection; no package.

Argument: a folder in which each process leaves the replies that it got, in a file named by its seed.
"""

import json
import os
import random
import socket
import sys
from urllib import request
from urllib.parse import urlsplit

seed = int(os.environ["AGENTRL_SEED"])
draw, url, got = random.Random(seed), os.environ["OPENAI_BASE_URL"] + "/chat/completions", []


def send(body, again, timeout=None):
    made = request.Request(url, body, {"x-stainless-retry-count": str(int(again))})
    with request.urlopen(made, timeout=timeout) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def leave(body):
    """Send a call and go away."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


for number in range(3):
    messages = [{"role": "user", "content": f"call {number}"}]
    body, again = json.dumps({"messages": messages}).encode(), False
    trouble = draw.choice(["timeout", "timeout", "leave", "twice", *[""] * 27])
    if trouble == "timeout":
        try:
            got.append(send(body, again, timeout=0.002))
            continue
        except OSError:
            again = True
    elif trouble == "leave":
        leave(body)
        again = True
    got.append(send(body, again))
    if trouble == "twice":  # the reply was lost behind the server
        assert send(body, again=True) == got[-1]
with open(os.path.join(sys.argv[1], str(seed)), "w") as file:
    json.dump(got, file)
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": 0.0}, file)
