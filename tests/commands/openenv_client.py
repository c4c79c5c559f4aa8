"""Plays episodes with OpenEnv's own client and prints the answers. Run with an interpreter that has `openenv`."""

import json
import random
import sys

from openenv.core import GenericEnvClient

url, episodes = sys.argv[1], int(sys.argv[2])
told = []
with GenericEnvClient(base_url=url).sync() as client:
    for seed in range(episodes):
        draw, answer = random.Random(seed), client.reset(seed=seed)
        names = [*answer.metadata["actions"], "dance"]
        told.append([answer.observation, answer.reward, answer.done, answer.metadata])
        while not answer.done:
            answer = client.step({"text": draw.choice(names)})
            told.append([answer.observation, answer.reward, answer.done, answer.metadata])
    state = client.state()
print(json.dumps([told, state]))
