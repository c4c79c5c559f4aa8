"""Base environment whose tasks are solved with tools, and a calculator as an example."""

import ast
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from agentrl_envs.tool_use.mcp import McpServer
from agentrl_envs.tools import find_function

Message = dict[str, Any]


class ToolEnv(gymnasium.Env[dict[str, Any] | str, str]):
    """Tasks for a model that calls tools. A reply may call several tools; a reply without a call is the answer.

    An action is an assistant's message as JSON: ``text``, and ``tool_calls`` with ``id``, ``name`` and ``arguments``
    (JSON text). An observation has the new messages for the model's next reply: the result of each tool.

    Args:
        tasks: file with one JSON object per line: ``prompt``, and ``answer``, the expected text.
        tools: Python functions as ``module:function``, with type hints and a docstring that names each argument.
        mcp: command of an MCP server on stdio, whose tools are also offered.
        system: text of the system message.
        max_turns: replies after which an episode is truncated.
    """

    free_text = True

    def __init__(
        self,
        tasks: str | None = None,
        tools: Sequence[str] = (),
        mcp: Sequence[str] = (),
        system: str = "",
        max_turns: int = 10,
    ) -> None:
        self.observation_space = gymnasium.spaces.Dict()
        self.action_space = gymnasium.spaces.Text(max_length=2**20, min_length=0)
        self.system, self.max_turns = system, max_turns
        self.functions: dict[str, Callable[..., Any]] = {}
        self.tool_schemas: list[Mapping[str, Any]] = []
        for path in tools:
            self.add_tool(find_function(path, "tools"))
        self._server = McpServer(mcp) if mcp else None
        if self._server is not None:
            for schema in self._server.tools():
                self.tool_schemas.append({"type": "function", "function": schema})
        self._tasks = read_tasks(tasks) if tasks is not None else []
        self.task: Mapping[str, Any] = {}
        self.turn = 0
        self.solved: list[Message] = []  # solved tasks, which are shown before each task
        self._digest = hashlib.blake2b(digest_size=16)  # digest of the conversation so far

    def add_tool(self, function: Callable[..., Any]) -> None:
        """Offer a Python function as a tool."""
        from transformers.utils import get_json_schema

        schema = get_json_schema(function)
        self.functions[schema["function"]["name"]] = function
        self.tool_schemas.append(schema)

    def add_example(self, prompt: str, tool: str, arguments: Mapping[str, Any]) -> None:
        """Show a solved task before each episode: a tool call, and the result of the call as the answer."""
        call = {"id": f"example{len(self.solved):02d}", "name": tool, "arguments": json.dumps(arguments)}
        answer = self._answer(call)
        self.solved += [
            {"role": "user", "content": [prompt]},
            {"role": "assistant", "content": [""], "tool_calls": [call]},
            answer,
            {"role": "assistant", "content": answer["content"]},
        ]

    def next_task(self) -> Mapping[str, Any]:
        """Return the task of an episode; all randomness is from ``self.np_random``."""
        return self._tasks[int(self.np_random.integers(len(self._tasks)))]

    def score(self, text: str) -> float:
        """Return the reward of an answer; by default 1 if it equals the task's answer, ignoring case and spaces."""
        return float(text.casefold().split() == str(self.task["answer"]).casefold().split())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any] | str, dict[str, Any]]:
        super().reset(seed=seed)
        self.task, self.turn, self._digest = self.next_task(), 0, hashlib.blake2b(digest_size=16)
        messages = [{"role": "system", "content": [self.system]}] if self.system else []
        task = {"role": "user", "content": [str(self.task["prompt"])]}
        return self._call([*messages, *self.solved, task]), {}

    def step(self, action: str) -> tuple[dict[str, Any] | str, float, bool, bool, dict[str, Any]]:
        reply = json.loads(action)
        self._digest.update(action.encode())
        self.turn += 1
        calls = reply.get("tool_calls") or []
        if not calls:
            reward = self.score(reply["text"])
            return "", reward, True, False, {"success": reward == 1.0}
        return self._call([self._answer(call) for call in calls]), 0.0, False, self.turn >= self.max_turns, {}

    def _call(self, messages: list[Message]) -> dict[str, Any]:
        self._digest.update(json.dumps(messages).encode())
        key = f"{self._digest.hexdigest()}#0"
        return {"call": {"messages": messages, "follows": self.turn - 1 if self.turn else None, "key": key}}

    def _answer(self, call: Mapping[str, Any]) -> Message:
        """Call a tool and return a message with the result, or with the error."""
        name = call["name"]
        try:
            arguments = json.loads(call["arguments"])
            if name in self.functions:
                said = str(self.functions[name](**arguments))
            elif self._server is not None:
                said = self._server.call(name, arguments)
            else:
                said = f"error: there is no tool {name}"
        except Exception as error:  # noqa: BLE001 - a user's tool may raise any error
            said = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "content": [said], "tool_call_id": call["id"], "name": name}

    def close(self) -> None:
        """End the MCP server, if there is one."""
        if self._server is not None:
            self._server.close()


def read_tasks(path: str) -> list[Mapping[str, Any]]:
    """Read a task file.

    Raises:
        ValueError: the file does not exist or is empty, or a line has no prompt or no answer.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"tasks names '{path}', which cannot be read: {error}.") from error
    if not lines or any("prompt" not in line or "answer" not in line for line in lines):
        raise ValueError(f"Each line of '{path}' (argument tasks) needs a prompt and an answer; give at least one.")
    return lines


EXAMPLES = ("31 * 7", "58 + 64", "12 * 45", "9 + 83", "76 * 20", "40 + 15")


class Calculator(ToolEnv):
    """Tasks with sums and products of random numbers, and a calculator as a tool.

    Args:
        largest: largest number in a task.
        examples: number of solved tasks that are shown first, at most 6.
        max_turns: replies after which an episode is truncated.
    """

    def __init__(self, largest: int = 99, examples: int = 0, max_turns: int = 4) -> None:
        super().__init__(system="Answer with the number alone. Use the tool.", max_turns=max_turns)
        self.largest = largest
        self.add_tool(calculate)
        for expression in EXAMPLES[:examples]:
            self.add_example(expression, "calculate", {"expression": expression})

    def next_task(self) -> Mapping[str, Any]:
        a, b = (int(self.np_random.integers(2, self.largest + 1)) for _ in range(2))
        sign = str(self.np_random.choice(["+", "*"]))
        return {"prompt": f"{a} {sign} {b}", "answer": str(calculate(f"{a} {sign} {b}"))}


_SIGNS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> float:
    """Calculate an expression.

    Args:
        expression: numbers with + - * / and brackets.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            return _SIGNS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{ast.unparse(node)} is not a number or one of + - * /")

    return value(ast.parse(expression.strip(), mode="eval").body)
