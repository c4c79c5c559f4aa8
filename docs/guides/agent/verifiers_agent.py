"""Play one task of a `verifiers` task set against the model that is trained, and write down its reward.

A line of the task file names the environment as `verifiers` configures it and the number of the task:
`{"env": {"taskset": {"id": "my_tasks"}}, "index": 3}`. Started with the Python of an environment that has
`verifiers` and `uv`, by `AgentProgram(command=[...])`.
"""

import asyncio
import itertools
import json
import os

import verifiers.v1 as vf

task = json.loads(os.environ["AGENTRL_TASK"])
config = task["env"]
# The null harness is a chat loop with the task's tools; a task set that brings its own program names another.
seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "network_notice": False}
for name, field in vf.env_config_type(config["taskset"]["id"], config.get("id", "")).model_fields.items():
    if isinstance(field.default, vf.AgentConfig):  # a role that a model plays
        config[name] = {**seat, **config.get(name, {})}
endpoint = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
context = vf.ModelContext("policy", endpoint, vf.Sampling(max_tokens=task.get("max_tokens")))


async def play() -> vf.Episode:
    """Play the task once."""
    env = vf.load_environment(vf.resolve_env_config(config))
    async with env.serving():
        chosen = next(itertools.islice(env.taskset, task["index"], None))
        return await env.run_episode(chosen, context)


episode = asyncio.run(play())
if not episode.ok:
    faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    raise SystemExit(f"the episode failed: {'; '.join(f'{fault.type}: {fault.message}' for fault in faults)}")
with open(os.environ["AGENTRL_RESULT"], "w") as file:
    json.dump({"reward": sum(trace.reward for trace in episode.traces)}, file)
