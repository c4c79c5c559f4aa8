"""Tools: what a call gives, and what goes wrong is told to the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl_envs.tool_use.env import Calculator, ToolEnv, calculate

SERVER = f"""
import sys
sys.path[:] = {sys.path!r}
from mcp.server.mcpserver import MCPServer
server = MCPServer("words")

@server.tool()
def count(text: str) -> int:
    '''Count words.'''
    return len(text.split())

server.run()
"""


def reply(text: str = "", *calls: tuple[str, dict[str, Any]]) -> str:
    listed = [{"id": str(i), "name": name, "arguments": json.dumps(a)} for i, (name, a) in enumerate(calls)]
    return json.dumps({"text": text, "tool_calls": listed})


def test_a_calculator_is_called_and_the_answer_ends_the_episode() -> None:
    env = gymnasium.make("agentrl_envs:Calculator-v0", disable_env_checker=True)
    observation, _ = env.reset(seed=4)
    task = observation["call"]["messages"][1]["content"][0]
    observation, reward, ended, cut, _ = env.step(reply("", ("calculate", {"expression": task})))
    (message,) = observation["call"]["messages"]
    assert (message["role"], message["tool_call_id"], reward, ended, cut) == ("tool", "0", 0.0, False, False)
    assert message["content"][0] == str(calculate(task))
    assert env.step(reply(f" {message['content'][0]}\n"))[1:3] == (1.0, True)
    env.reset(seed=4)
    assert env.step(reply("no idea"))[1:3] == (0.0, True)


def test_solved_tasks_are_shown_before_the_own_one() -> None:
    env = Calculator(examples=2)
    observation, _ = env.reset(seed=0)
    messages = observation["call"]["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        *["user", "assistant", "tool", "assistant"] * 2,
        "user",
    ]
    user, call, answer, said = messages[1:5]
    assert json.loads(call["tool_calls"][0]["arguments"])["expression"] == user["content"][0]
    assert answer["tool_call_id"] == call["tool_calls"][0]["id"]
    assert said["content"] == answer["content"] == [str(calculate(user["content"][0]))]


def test_what_goes_wrong_is_told_and_every_call_is_answered() -> None:
    env = Calculator(max_turns=1)
    env.reset(seed=0)
    calls = [
        ("calculate", {"expression": "1/0"}),
        ("calculate", {"expr": "1"}),
        ("other", {}),
        ("calculate", {"expression": "-2*(3+4)"}),
    ]
    observation, _, ended, cut, _ = env.step(reply("", *calls))
    texts = [message["content"][0] for message in observation["call"]["messages"]]
    assert texts[0] == "error: ZeroDivisionError: division by zero"
    assert texts[1].startswith("error: TypeError")
    assert texts[2:] == ["error: there is no tool other", "-14"]
    assert (ended, cut) == (False, True)


@pytest.mark.parametrize("text", ["open('x')", "2**9**9", "a", "'a' * 3"])
def test_the_calculator_runs_no_code(text: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        calculate(text)


def test_own_functions_and_tasks_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 + 2", "answer": 4}\n')
    env = ToolEnv(str(tmp_path / "tasks.jsonl"), tools=["agentrl_envs.tool_use.env:calculate"])
    assert [tool["function"]["name"] for tool in env.tool_schemas] == ["calculate"]
    env.reset(seed=0)
    assert env.step(reply("4"))[1] == 1.0
    with pytest.raises(ValueError, match="no function nothing"):
        ToolEnv(str(tmp_path / "tasks.jsonl"), tools=["agentrl_envs.tool_use.env:nothing"])
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 + 2"}\n')
    with pytest.raises(ValueError, match="a prompt and an answer"):
        ToolEnv(str(tmp_path / "tasks.jsonl"))


def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "How many words has this?", "answer": 5}\n')
    env = ToolEnv(str(tmp_path / "tasks.jsonl"), mcp=[sys.executable, str(tmp_path / "server.py")])
    assert env.tool_schemas[0]["function"]["parameters"]["required"] == ["text"]
    env.reset(seed=0)
    observation, *_ = env.step(reply("", ("count", {"text": "How many words has this?"})))
    assert observation["call"]["messages"][0]["content"] == ["5"]
    env.close()
