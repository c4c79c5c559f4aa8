"""The scripts of the guide, played by hand: what they ask, and what they earn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.episodes.agent_env import AgentEnv

pytest.importorskip("openai")
SCRIPTS = Path(__file__).parents[2] / "docs" / "guides" / "agent"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SCRIPTS / name).read_text().splitlines()]


def reply(text: str, *calls: dict[str, Any]) -> str:
    reason = "tool_calls" if calls else "stop"
    given = {"text": text, "tool_calls": calls, "finish_reason": reason, "prompt_tokens": 1, "tokens": 1}
    return json.dumps(given)


def new_texts(observation: Any) -> list[str]:
    return ["".join(message["content"]) for message in observation["call"]["messages"]]


def test_the_calculator_calls_its_tool_and_repeats_what_it_says() -> None:
    (task,) = tasks = lines("calculator_test.jsonl")[:1]
    score = lambda given, text: float(text == given["answer"])  # noqa: E731
    env = AgentEnv([sys.executable, str(SCRIPTS / "calculator.py")], tasks, score)
    try:
        observation, _ = env.reset(seed=0)
        assert new_texts(observation)[-1] == task["expression"]
        assert [tool["function"]["name"] for tool in env.tool_schemas] == ["calculate"]
        call = {"id": "c1", "name": "calculate", "arguments": json.dumps({"expression": task["expression"]})}
        observation, *_ = env.step(reply("", call))
        assert new_texts(observation) == [task["answer"]]
        assert observation["call"]["follows"] == 0
        _, reward, ended, _, info = env.step(reply(task["answer"]))
        assert (reward, ended) == (1.0, True)
        assert info["metrics"]["agent/continued"] == 1
    finally:
        env.close()


def test_the_compacting_script_makes_more_than_30_calls_and_begins_anew_behind_each_summary() -> None:
    env = AgentEnv([sys.executable, str(SCRIPTS / "compaction.py")], lines("compaction_test.jsonl")[:1])
    try:
        observation, _ = env.reset(seed=0)
        ended, last = False, ""
        while not ended:
            asked = new_texts(observation)[-1]
            last = asked if asked.isdigit() else last
            observation, reward, ended, _, info = env.step(reply(last))
        assert reward == 1.0
        assert info["metrics"]["agent/calls"] == 34
        assert info["metrics"]["agent/anew"] == 5
        assert info["metrics"]["agent/earlier"] == 0
    finally:
        env.close()


@pytest.mark.parametrize("name", ["calculator_train", "calculator_test"])
def test_answers_of_tasks_are_right(name: str) -> None:
    from agentrl_envs.tool_use.env import calculate

    tasks = lines(f"{name}.jsonl")
    assert all(str(calculate(task["expression"])) == task["answer"] for task in tasks)
    assert len({task["expression"] for task in tasks}) == len(tasks)
