"""A function as an agent program: ``python call.py FOLDER MODULE:FUNCTION`` calls it with the task.

A number that it returns is the reward. The standard library alone is imported.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys

if __name__ == "__main__":
    sys.path[0] = sys.argv[1]  # in place of the folder of this file
    _module, _, _name = sys.argv[2].partition(":")
    _reward = getattr(importlib.import_module(_module), _name)(json.loads(os.environ["AGENTRL_TASK"]))
    if inspect.iscoroutine(_reward):
        _reward = asyncio.run(_reward)
    if _reward is not None:
        with open(os.environ["AGENTRL_RESULT"], "w") as _file:
            json.dump({"reward": float(_reward)}, _file)
