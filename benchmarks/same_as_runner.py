"""The command `agentrl` of one checkout, as often as it is asked for: what takes longest, the imports, is done once.

Reads one JSON list [folder, arguments] in each line and answers with the exit code. Each run is a fork of this process,
in its folder, where ``out.txt`` and ``log.txt`` take its standard output and errors.
"""

import json
import os
import runpy
import sys

import lightning.pytorch.cli  # noqa: F401
import peft  # noqa: F401
import transformers

import agentrl_envs
import lightning_agentrl.__main__

transformers.AutoModelForCausalLM  # noqa: B018 - imported when it is asked for

del sys.modules["lightning_agentrl.__main__"]  # imported for what it imports; each run executes it anew

print(json.dumps([lightning_agentrl.__file__, agentrl_envs.__file__]), flush=True)
for line in sys.stdin:
    folder, arguments = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out.txt"), (2, "log.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.argv = ["agentrl", *arguments]
        runpy.run_module("lightning_agentrl", run_name="__main__", alter_sys=True)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
