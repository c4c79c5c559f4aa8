"""`agentrl check-env --agent`: whether an agent program replays."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_agentrl.commands.check_env import check_agent
from tests.published import published_folder

AGENT = """
import json, os, sys, threading
from urllib import request

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "how": {"type": "string", "enum": ["up", "down"]}},
    "required": ["a", "how"]}}}]

def ask(messages, **more):
    body = json.dumps({"messages": messages, "tools": TOOLS, **more}).encode()
    with request.urlopen(request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)) as answer:
        return json.load(answer)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

messages = [user(json.loads(os.environ["AGENTRL_TASK"])["q"])]
for step in range(3):
    reply = ask(messages)
    messages.append(reply)
    for call in reply.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        assert type(arguments["a"]) is int and arguments["how"] in ("up", "down")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        open("called", "a").write("x")
    messages.append(user("go on"))
subs = [threading.Thread(target=ask, args=([user(f"sub {i}")],)) for i in range(3)]
[sub.start() for sub in subs]
[sub.join() for sub in subs]
"""


def checked(folder: Path, text: str, model: Path | None = None, seconds: float = 20.0) -> bool:
    (folder / "agent.py").write_text(text)
    (folder / "tasks.jsonl").write_text('{"q": "hello"}\n')
    command = shlex.join([sys.executable, "agent.py"])
    return check_agent(command, "tasks.jsonl", None if model is None else str(model), (), seconds)


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "qwen2_5"])
def test_an_agent_with_tools_and_calls_at_once_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None
) -> None:
    model = None if template is None else published_folder(tmp_path / "model", template)
    assert checked(tmp_path, AGENT, model), capsys.readouterr().out
    assert "18 calls of 3 episodes were the same" in capsys.readouterr().out
    assert len((tmp_path / "called").read_text()) >= 6  # tools were called, in both plays


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("go on", "go on {os.urandom(4).hex()}"), r"call 1: content of message \d was 'go on \w+' and is 'go on \w+'"),
        (('"content": "3"', '"content": str(os.getpid())'), r"call \d: content of message 2 was '\d+' and is '\d+'"),
        (("ask(messages)", "ask(messages, max_tokens=os.getpid())"), r"call 0: max_tokens was \d+ and is \d+"),
    ],
)
def test_what_differs_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], what: str
) -> None:
    text = AGENT.replace('user("go on")', 'user(f"go on")').replace(*change)
    assert not checked(tmp_path, text, seconds=1.0)

    assert re.search(what, capsys.readouterr().out)


def test_a_program_that_makes_no_call_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not checked(tmp_path, "print('nothing')")
    assert "without a call of the model" in capsys.readouterr().out


@pytest.mark.slow
def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tools"):
        checked(tmp_path, AGENT, published_folder(tmp_path / "model", "gemma2"))
