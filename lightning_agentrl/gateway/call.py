"""Script that runs a function with a task as an agent program: ``python call.py FOLDER MODULE:FUNCTION``.

If the function returns a number, this number is the reward. The script imports only the standard library.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys

if __name__ == "__main__":
    sys.path[0] = sys.argv[1]  # the agent's folder replaces the folder of this file
    _module, _, _name = sys.argv[2].partition(":")
    _reward = getattr(importlib.import_module(_module), _name)(json.loads(os.environ["AGENTRL_TASK"]))
    if inspect.iscoroutine(_reward):
        _reward = asyncio.run(_reward)
    if _reward is not None:
        with open(os.environ["AGENTRL_RESULT"], "w") as _file:
            json.dump({"reward": float(_reward)}, _file)
