"""An agent of openai-agents with a tool, as its users write one."""

import json
import os
import random

from agents import Agent, Runner, function_tool


@function_tool
def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: from 1 to 9.
    """
    global won
    won = won or number == secret
    return "right" if number == secret else "too low" if number < secret else "too high"


won, secret = False, random.Random(os.environ["AGENTRL_SEED"]).randint(1, 9)
player = Agent(name="player", instructions="Find a number from 1 to 9 with the tool.", tools=[guess])
try:
    Runner.run_sync(player, "Begin.", max_turns=6)
except Exception as error:  # noqa: BLE001 - such as too many turns
    print(error)
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": float(won)}, file)
