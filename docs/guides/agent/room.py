"""An agent that walks through a room with the client of OpenAI; it knows nothing of training."""

import json
import os

import gymnasium
from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
env = gymnasium.make("agentrl_envs:BabyAIText-GoToObjS6-v0", mission_in="observation", max_turns=12)
seed = json.loads(os.environ["AGENTRL_TASK"])["seed"] + int(os.environ["AGENTRL_SEED"])
observation, _ = env.reset(seed=seed % 2**31)
rules = env.unwrapped.system_prompt
total, over = 0.0, False
while not over:
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": observation}]
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    observation, reward, ended, cut, _ = env.step(reply.choices[0].message.content)
    total, over = total + reward, ended or cut
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": total}, file)
