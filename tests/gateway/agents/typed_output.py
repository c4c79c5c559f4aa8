"""An agent of pydantic-ai with a typed output."""

import json
import os
import random

from pydantic import BaseModel
from pydantic_ai import Agent

secret = random.Random(os.environ["AGENTRL_SEED"]).randint(1, 9)


class Guess(BaseModel):
    """A guess."""

    number: int


agent = Agent("openai:policy", output_type=Guess, system_prompt="Guess a number from 1 to 9.")
try:
    number = agent.run_sync("Which number is it?").output.number
except Exception as error:  # noqa: BLE001 - such as too many turns
    print(error)
    number = 0
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(number == secret)}, file)
