"""A ToolCallingAgent of smolagents."""

import json
import os
import random

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

won, secret = False, random.Random(os.environ["AGENTRL_SEED"]).randint(1, 9)


@tool
def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: from 1 to 9.
    """
    global won
    won = won or number == secret
    return "right" if number == secret else "too low" if number < secret else "too high"


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[guess], model=model, max_steps=4)
try:
    agent.run("Find a number from 1 to 9 with the tool guess.")
except Exception as error:  # noqa: BLE001 - such as too many turns
    print(error)
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(won)}, file)
