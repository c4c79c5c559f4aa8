"""An agent program as an environment, without a model."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.episodes.agent_env import AgentEnv
from lightning_agentrl.errors.faults import EnvError

HEAD = """
import json, os, sys
from urllib import request
def asked(*texts, path="/chat/completions", **more):
    body = {"messages": [{"role": "assistant" if i % 2 else "user", "content": t} for i, t in enumerate(texts)], **more}
    url = os.environ["OPENAI_BASE_URL"] + path
    with request.urlopen(request.Request(url, json.dumps(body if path != "/reward" else more).encode())) as answer:
        found = json.load(answer)
    return found if path == "/reward" else (found["choices"][0]["message"]["content"], found["id"])
def ask(*texts, **more):
    found = asked(*texts, **more)
    return found if more.get("path") == "/reward" else found[0]
task = json.loads(os.environ["AGENTRL_TASK"])
def result(reward): open(os.environ["AGENTRL_RESULT"], "w").write(json.dumps({"reward": reward}))
"""
TASKS = [{"question": "1 + 1", "answer": "2"}]


def agent(tmp_path: Path, text: str, **settings: Any) -> AgentEnv:
    (tmp_path / "agent.py").write_text(HEAD + text)
    return AgentEnv([sys.executable, str(tmp_path / "agent.py")], TASKS, **settings)


def reply(text: str) -> str:
    return json.dumps({"text": text})


def texts(observation: dict[str, Any]) -> list[str]:
    return ["".join(message["content"]) for message in observation["call"]["messages"]]


def test_an_observation_is_what_a_call_adds_and_the_result_its_reward(tmp_path: Path) -> None:
    env = agent(tmp_path, "a = ask(task['question'])\nb = ask(task['question'], a, 'sure?')\nresult(b == 'yes')")
    observation, _ = env.reset(seed=3)
    assert texts(observation) == ["1 + 1"]
    assert observation["call"]["follows"] is None
    observation, reward, ended, cut, _ = env.step(reply(" two"))
    assert texts(observation) == ["sure?"]
    assert (observation["call"]["follows"], reward, ended, cut) == (0, 0.0, False, False)
    _, reward, ended, cut, info = env.step(reply("yes"))
    assert (reward, ended, cut) == (1.0, True, False)
    assert info["metrics"]["agent/calls"] == 2
    assert info["metrics"]["agent/continued"] == info["metrics"]["agent/rows"] == 1
    assert info["metrics"]["agent/no_reward"] == 0
    env.close()


def test_programs_forked_from_a_warm_interpreter_are_as_if_begun_anew(tmp_path: Path) -> None:
    """Their own arguments, folder, exit codes and modules; what one changes, no other sees."""
    text = (
        "import asyncio\nseen = 'json' in sys.modules and not hasattr(json, 'mark'); json.mark = True\n"
        "ask(task['question'])\nif not seen: sys.exit(5)\nresult(len(sys.argv))\nraise ValueError('at the end')"
    )
    env = agent(tmp_path, text, preload=["json", "asyncio"], on_error=-1.0)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        assert texts(observation) == ["1 + 1"]
        assert env.step(reply("2"))[1:3] == (-1.0, True)
        assert env._process is not None
        assert env._process.exit_code == 1
        assert "at the end" in env._process.excerpt()
    env.close()


def test_a_scorer_sees_the_task_and_the_last_text(tmp_path: Path) -> None:
    env = agent(tmp_path, "ask(task['question'])", score=lambda task, text: float(task["answer"] == text))
    env.reset(seed=0)
    assert env.step(reply("2"))[1:3] == (1.0, True)
    env.close()
    env = agent(tmp_path, "ask('x')\nresult(0.5)", score=lambda task, text: float(task["answer"] == text))
    env.reset(seed=0)
    assert env.step(reply("2"))[1] == 1.5  # what the program says and the scorer add up
    env.close()


def test_a_posted_reward_counts_once(tmp_path: Path) -> None:
    env = agent(tmp_path, "a = ask('x')\nask(path='/reward', reward=0.25)\nask('x', a, 'y')")
    env.reset(seed=0)
    assert env.step(reply("a"))[1] == 0.25
    assert env.step(reply("b"))[1:3] == (0.0, True)
    env.close()


def test_a_posted_reward_belongs_to_the_call_whose_completion_it_names(tmp_path: Path) -> None:
    env = agent(
        tmp_path,
        "a, name = asked('x')\nb = ask('x', a, 'y')\nask(path='/reward', reward=0.25, id=name)\n"
        "ask(path='/reward', reward=0.5)\nresult(1)",
    )
    env.reset(seed=0)
    assert env.step(reply("a"))[1] == 0.0
    _, reward, ended, _, info = env.step(reply("b"))
    assert (reward, ended) == (1.5, True)
    assert info["earlier_rewards"] == {0: 0.25}
    env.close()


def test_calls_beyond_the_most_are_a_cut(tmp_path: Path) -> None:
    env = agent(tmp_path, "while True: ask('x')", max_calls=2)
    env.reset(seed=0)
    assert env.step(reply("a"))[2:4] == (False, False)
    observation, _, ended, cut, _ = env.step(reply("b"))
    assert (ended, cut) == (False, True)
    assert observation["call"]["key"].endswith("#2")  # the third of equal calls
    env.close()


@pytest.mark.parametrize(
    ("text", "settings", "kind", "what"),
    [
        (
            "print('no key'); sys.exit(3)",
            {},
            "no_call",
            r"exit code 3\) without a call .*http://127.0.0.1:\d+/.*no key",
        ),
        ("ask('x'); sys.exit(3)", {}, "exit", "exit code 3"),
        ("ask('x'); sys.exit(75)", {"on_error": -1.0}, "infrastructure", "exit code 75"),
        ("ask('x')\nimport time; time.sleep(60)", {"seconds_between_calls": 0.5}, "timeout", "seconds_between_calls"),
        ("ask('x'); open(os.environ['AGENTRL_RESULT'], 'w').write('yes')", {}, "reward", "result"),
        ("ask('x'); result(float('nan'))", {}, "reward", "finite"),
    ],
)
def test_faults_have_a_kind_and_a_sentence(
    tmp_path: Path, text: str, settings: dict[str, Any], kind: str, what: str
) -> None:
    env = agent(tmp_path, text, **settings)

    def play() -> None:
        env.reset(seed=0)
        env.step(reply("a"))

    with pytest.raises(EnvError, match=what) as fault:
        play()
    assert fault.value.kind == kind
    assert env._line is not None
    assert env._line.token not in str(fault.value)
    env.close()


def test_a_failure_may_have_a_reward(tmp_path: Path) -> None:
    env = agent(tmp_path, "ask('x'); sys.exit(1)", on_error=-1.0)
    env.reset(seed=0)
    assert env.step(reply("a"))[1:3] == (-1.0, True)
    env.close()


def test_the_trainer_keeps_its_secrets_and_masks_those_that_it_passes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_API_KEY", "a-secret")
    monkeypatch.setenv("PASSED_TOKEN", "another-secret")
    show = "print(os.environ.get('MINE_API_KEY'), os.environ['PASSED_TOKEN']); ask('x'); sys.exit(1)"
    env = agent(tmp_path, show, environment=["PASSED_TOKEN"])
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"it wrote: None \*\*\*"):
        env.step(reply("a"))
    env.close()


@pytest.mark.parametrize("preload", [[], ["json"]])
def test_everything_that_an_agent_starts_ends_with_its_episode(tmp_path: Path, preload: list[str]) -> None:
    pids = tmp_path / "pids"
    start = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
        "ask('x'); ask('y')"
    )
    env = agent(tmp_path, start, preload=preload)
    env.reset(seed=0)
    env.step(reply("a"))
    env.close()
    child = int(pids.read_text())
    for _ in range(500):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_sub_agents_and_calls_at_once_have_places_of_their_own(tmp_path: Path) -> None:
    env = agent(
        tmp_path,
        "import threading\n"
        "a = ask('main')\n"
        "subs = [threading.Thread(target=ask, args=(f'sub {i}',)) for i in range(3)]\n"
        "[s.start() for s in subs]; [s.join() for s in subs]\n"
        "ask('main', a, 'go on')",
    )
    env.reset(seed=0)
    seen = []
    observation, _, ended, _, _ = env.step(reply("m"))
    while not ended:
        seen.append((texts(observation), observation["call"]["follows"]))
        observation, _, ended, _, _ = env.step(reply(texts(observation)[0]))
    assert sorted(seen[:3]) == [([f"sub {i}"], None) for i in range(3)]
    assert seen[3] == (["go on"], 0)
    env.close()
