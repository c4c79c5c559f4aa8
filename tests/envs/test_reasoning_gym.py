"""Questions of reasoning-gym: the same for a seed in every process, and scored whatever the reply is."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import gymnasium
import pytest

pytest.importorskip("reasoning_gym", reason="of an extra")

from agentrl_envs.reasoning_gym.env import BROKEN, EVALUATED, harmless
from tests.envs.hostile import REPLIES

# Of these, questions or answers change with the hash seed, or the first question of a process differs.
MOODY = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder", "list_functions")
ASK = """
import gymnasium, json, sys
told = {}
for dataset in sys.argv[2:]:
    env = gymnasium.make("agentrl_envs:ReasoningGym-v0", dataset=dataset, disable_env_checker=True)
    told |= {f"{dataset} {seed}": env.reset(seed=seed)[0] for seed in json.loads(sys.argv[1])}
print(json.dumps(told))
"""


def make(dataset: str, **kwargs: Any) -> gymnasium.Env:
    return gymnasium.make("agentrl_envs:ReasoningGym-v0", dataset=dataset, disable_env_checker=True, **kwargs)


def test_an_answer_is_scored_and_ends_the_episode():
    env = make("leg_counting", config={"max_animals": 4})
    assert (env.unwrapped.free_text, env.unwrapped.one_turn) == (True, True)
    questions = [env.reset(seed=seed)[0] for seed in (1, 2, 1)]
    assert questions[0] == questions[2] != questions[1]
    answer = env.unwrapped._question["answer"]
    answered = env.step(f" {answer}\n")
    assert answered[1:4] == (1.0, True, False)
    assert answered[-1]["success"]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(answer)
    env.reset(seed=1)
    answered = env.step("-3")
    assert answered[1] < 0.1
    assert not answered[-1]["success"]


def test_a_question_that_is_drawn_from_what_all_share_is_that_of_its_seed():
    """One of the generators behind list_functions asks Python's own generator, which nobody seeds."""
    env = make("list_functions")
    before = random.getstate()
    told = [[env.reset(seed=seed)[0] for seed in range(60)] for _ in range(2)]
    assert told[0] == told[1]
    assert random.getstate() == before


def test_an_answer_may_stand_behind_a_mark():
    env = make("leg_counting", answer_after="Answer:")
    for said, paid in (("I think Answer: 3, no. Answer: {}", 1.0), ("{}", 0.0), ("", 0.0)):
        env.reset(seed=5)
        *_, info = answered = env.step(said.format(env.unwrapped._question["answer"]))
        assert answered[1] == paid
        assert info["invalid_action"] == (paid == 0)
    assert "Answer:" in env.unwrapped.system_prompt


@pytest.mark.parametrize(
    ("dataset", "reply"), [("boxnet", "5"), ("prime_factorization", "[F3]"), ("game_of_life", "{}")]
)
def test_a_scorer_that_raises_gives_nothing_and_is_counted(dataset, reply):
    env = make(dataset)
    failed = 0.0
    for seed in range(3):
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step(reply)
        assert terminated
        assert reward == 0.0
        failed += info["metrics"]["scorer_errors"]
    assert failed > 0


CODE = (
    "__import__('os').environ.__setitem__('RAN', '1')",
    "[].__class__",
    "exec(chr(49))",
    "ｅｘｅｃ(chr(49))",
    "S('e'+'x'+'e'+'c'+'(1)')",
    'S("\\145")',
    "(lambda: 0)()",
)


@pytest.mark.parametrize(
    "dataset", [EVALUATED[0], *(pytest.param(one, marks=pytest.mark.slow) for one in EVALUATED[1:])]
)
def test_no_reply_is_run_as_code(dataset, monkeypatch):
    """Their scorers run an answer as Python; what is no value or formula does not reach them."""
    monkeypatch.delenv("RAN", raising=False)
    env = make(dataset)
    for seed in range(20):
        env.reset(seed=seed)
        answer = str(env.unwrapped._question["answer"])
        assert harmless(answer)
        assert env.step(answer)[1] >= 0.99
    for reply in CODE:
        env.reset(seed=0)
        _, reward, _, _, info = env.step(reply)
        assert (reward, info["metrics"]["scorer_errors"], "RAN" in os.environ) == (0.0, 1.0, False)


ENDLESS = (
    *("9**9**9", "((9**999)**999)**999", "9**(9**9)", "3 + -9**9**9", "1<<10**10", "99999999!", "E**E**E**E"),
    "exp(exp(exp(exp(9))))",
    *("[0]*10**10", "'A'*10**10", "[9**9**9]", "'%999999999d'%1", "f'{1:999999999}'"),
)


@pytest.mark.parametrize("dataset", ["countdown", "n_queens"])
def test_no_reply_is_computed_for_hours(dataset):
    env = make(dataset)
    for reply in ENDLESS:
        env.reset(seed=0)
        _, reward, _, _, info = env.step(reply)
        assert (reward, info["metrics"]["scorer_errors"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        *("8/(3 - 8/3)", "-(12 + 7)*99 - 4", "x**3/3 + exp(2*x)*sin(x) + C", "-(3*x + 2)**12/8"),
        *("exp(-x**2/250 + 9*x)", "sqrt(x**2 + 1)*log(x)", "2**10", "[[1, 0], [0, 1]]", "['A', 'B']", "1 0\n0 1"),
        *("_ Q _ _\n_ _ _ Q", "ABCDE", ""),
    ],
)
def test_values_and_formulas_are_harmless(answer):
    assert harmless(answer)


@pytest.mark.parametrize("dataset", ["leg_counting", "prime_factorization", "number_sorting"])
def test_hostile_replies_are_scored(dataset):
    env = make(dataset)
    for reply in REPLIES:
        env.reset(seed=1)
        _, reward, terminated, truncated, _ = env.step(reply)
        assert 0 <= reward <= 0.05
        assert (terminated, truncated) == (True, False)


@pytest.mark.slow
def test_questions_are_the_same_in_every_process_with_one_hash_seed():
    """Fresh processes with one hash seed agree, whatever they are asked first."""
    asked = []
    for datasets, seeds in ((MOODY, [3, 1, 2]), (MOODY[::-1], [2, 1, 3])):
        environ = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", ASK, json.dumps(seeds), *datasets]
        ran = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
        asked.append(json.loads(ran.stdout))
    assert asked[0] == asked[1]


@pytest.mark.slow
def test_a_run_asks_in_processes_with_that_hash_seed():
    from lightning_agentrl.episodes.env_worker import Start
    from lightning_agentrl.rollout import EnvConfig

    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", ASK, "[3]", "ransom_note"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    worker = EnvConfig("agentrl_envs:ReasoningGym-v0", {"dataset": "ransom_note"}).make_worker()
    try:
        assert worker.reset_now(Start(0, 0, 3)).observation == json.loads(ran.stdout)["ransom_note 3"]
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        *(({"dataset": name}, f"{name} of reasoning-gym is not supported: its scorer") for name in BROKEN),
        ({"dataset": "leg_count"}, "no generator 'leg_count'; known: .*leg_counting"),
        ({"dataset": "leg_counting", "config": {"legs": 3}}, "config {'legs': 3}"),
        ({"dataset": "leg_counting", "config": {"min_animals": 0}}, "min_animals must be positive"),
        ({"dataset": "leg_counting", "answer_after": ""}, "answer_after must be a text"),
        ({"dataset": "leg_counting", "config": ["max_animals"]}, "config must be settings of leg_counting"),
    ],
)
def test_generators_that_cannot_be_used_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)
