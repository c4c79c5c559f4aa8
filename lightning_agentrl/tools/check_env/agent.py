"""Check that an agent program makes the same calls when it is run twice with the same replies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_agentrl.episodes.agent_env import AgentEnv
from lightning_agentrl.episodes.env_worker import ReplayDiffersError
from lightning_agentrl.prompts.conversation import first_difference
from lightning_agentrl.prompts.template import ChatTemplate, Message, Tool
from lightning_agentrl.prompts.tool_calls import ToolCallReader

Call = Mapping[str, Any]  # a call, as in an observation of AgentEnv
Action = dict[str, Any]
_LIMITS = ("stop", "max_tokens", "calls_tools")


class Probe:
    """Generator of probe replies. If the call offers tools, every other reply calls a tool.

    Args:
        template: chat template with which tool calls are written and parsed; with None, calls are passed as messages.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self.template = template
        self._reader: ToolCallReader | None = None

    def reply(self, call: Call, tools: Sequence[Tool], number: int, seed: int) -> Action:
        """Return the reply to the call with index ``number`` in the episode with this seed."""
        draw = random.Random(f"{seed} {number}")
        action: Action = {"text": f"probe {draw.randrange(1000)}", "key": call["key"]}
        if not (tools and call["calls_tools"]) or (seed + number) % 2:
            return action
        function = draw.choice(list(tools))["function"]
        name, arguments = function["name"], _example(function.get("parameters") or {}, draw)
        if self.template is not None:
            if self._reader is None:
                self._reader = ToolCallReader(self.template)
            ((name, arguments),) = self._reader.read(self._written(name, arguments, tools), tools).calls
        made = {"id": f"c{number:05d}000", "name": name, "arguments": json.dumps(arguments)}
        return action | {"text": "", "tool_calls": [made], "finish_reason": "tool_calls"}

    def _written(self, name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> str:
        """Return the text of a reply that calls a tool, in the chat template's format."""
        assert self.template is not None
        function = {"name": name, "arguments": arguments}
        call = {"id": "probe0001", "type": "function", "function": function}
        asked: list[Message] = [self.template.message("user", "probe")]
        before = self.template.apply(asked, True, tools)
        reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        after = self.template.apply([*asked, reply], False, tools)
        return after[len(before) : after.rfind(self.template.turn_close)]


def replay_agent(make: Callable[[], AgentEnv], probe: Probe, seeds: Sequence[int]) -> tuple[int, str]:
    """Play each episode twice.

    Args:
        make: function that returns the program as an environment.
        probe: generator of the replies.
        seeds: seeds of the episodes.

    Returns:
        The number of equal calls, and a sentence about the first difference, empty if all calls are equal.

    Raises:
        EnvError: the program makes no call, or makes its call too late.
    """
    same = 0
    for seed in seeds:
        env = make()
        try:
            calls, actions = _played(env, probe, seed)
            differs = _played_again(env, calls, actions, seed)
        finally:
            env.close()
        if differs:
            return same, f"seed {seed}, {differs}"
        same += len(calls)
    return same, ""


def _played(env: AgentEnv, probe: Probe, seed: int) -> tuple[list[Call], list[Action]]:
    calls: list[Call] = []
    actions: list[Action] = []
    observation, _ = env.reset(seed=seed)
    over = False
    while not over:
        assert isinstance(observation, dict)
        calls.append(observation["call"])
        actions.append(probe.reply(calls[-1], env.tool_schemas, len(calls) - 1, seed))
        observation, _, ended, cut, _ = env.step(json.dumps(actions[-1]))
        over = ended or cut
    return calls, actions


def _played_again(env: AgentEnv, calls: Sequence[Call], actions: Sequence[Action], seed: int) -> str:
    """Replay an episode with the same replies and return the first difference; parallel calls may be reordered."""
    env.reset(seed=seed)
    for number, action in enumerate(actions):
        try:
            _, _, ended, cut, _ = env.step(json.dumps(action))
        except ReplayDiffersError as error:
            return f"call {number}: {_difference(calls, actions, number, error.call or {})}"
        if ended and number + 1 < len(actions):
            return f"the program ended after {number + 1} calls, but made {len(actions)} in the first run"
    return "" if ended or cut else f"the program made call {len(actions)}, but had ended before it in the first run"


def _difference(calls: Sequence[Call], actions: Sequence[Action], number: int, now: Call) -> str:
    def conversation(call: Call) -> list[Mapping[str, Any]]:
        if (follows := call["follows"]) is None:
            return [*call["messages"]]
        reply = {"role": "assistant", "content": [actions[follows]["text"]]}
        reply |= {"tool_calls": made} if (made := actions[follows].get("tool_calls")) else {}
        return [*conversation(calls[follows]), reply, *call["messages"]]

    before = calls[number]
    for name in _LIMITS:
        if before[name] != now[name]:
            return f"{name} was {before[name]!r} and is {now[name]!r}"
    return first_difference(conversation(before), conversation(now))


def _example(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """Return a random value that matches the JSON schema of a tool's argument."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return _example(schema[name][0], draw)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _example(inner, draw) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {}), draw)]
    return {"integer": draw.randrange(10), "number": 0.5, "boolean": True, "null": None}.get(kind, "probe")
