"""One-turn tasks: files and scorers, and tasks beside environments in one rollout."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import Start
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.episodes.tasks import OneTurn, Task, read_tasks
from lightning_agentrl.errors import EnvError
from lightning_agentrl.rollout import (
    EnvConfig,
    ExactMatch,
    FullMemory,
    GroupRollout,
    PatternMatch,
    PromptFormat,
    RolloutDataModule,
    Scorer,
    TaskSet,
    TurnInteraction,
    WindowMemory,
)
from lightning_agentrl.rollout.collector import origin_of
from tests.rollout.scripted import Learner, play_held_out

SUMS = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(4) for b in range(4)]


class Letters(Scorer):
    """Letters of the reply."""

    needs_answer = False

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        return float(len(reply))


def file_of(path: Path, entries: list[Any]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return file_of(tmp_path / "sums.jsonl", SUMS)


def collect(folder: Path, count: int = 1, **settings: Any) -> list[Any]:
    """Rollouts of a data module, and a validation of four episodes."""
    defaults = {"num_envs": 4, "prompt": PromptFormat(max_prompt_tokens=700), "interaction": TurnInteraction(4)}
    data = RolloutDataModule(**(defaults | settings), seed=3)
    data.setup("fit")
    Learner(folder).connect(data)
    try:
        return [data.stream.collect() for _ in range(count)] + [play_held_out(data, held_out_seeds()[:4])]
    finally:
        data.teardown("fit")


@pytest.mark.parametrize(
    ("scorer", "reply", "score"),
    [
        (ExactMatch(), " The  Hague\n", 1),
        (ExactMatch(), "the hague", 1),
        (ExactMatch(), "The Hague.", 0),
        (PatternMatch(r"answer: ([^.]*)"), "Answer: Utrecht. No, answer: The Hague.", 1),
        (PatternMatch(r"answer: ([^.]*)"), "Answer: The Hague. No, answer: Utrecht.", 0),
        (PatternMatch(r"answer: ([^.]*)"), "The Hague", 0),
        (PatternMatch(r"(?-i:answer): ([^.]*)"), "Answer: The Hague", 0),
        (PatternMatch(r"The \w+"), "It is The Hague", 1),
        (PatternMatch(r"The (x)?"), "The Hague", 0),
    ],
)
def test_scores(scorer: Scorer, reply: str, score: float) -> None:
    assert scorer.score("Where?", reply, "The Hague") == score


def test_a_pattern_alone_asks_for_a_fit() -> None:
    assert [PatternMatch(r"\d+").score("Count.", reply, None) for reply in ("one", "1 2")] == [0, 1]
    with pytest.raises(ValueError, match=r"the pattern '\(' is not a regular expression"):
        PatternMatch("(")


def test_an_episode_is_one_task() -> None:
    env = OneTurn([Task(f"task {i}", str(i)) for i in range(50)], ExactMatch(), "Answer.")
    first = env.reset(seed=5)[0]
    assert env.reset(seed=5)[0] == first
    assert len({env.reset(seed=seed)[0] for seed in range(20)}) > 12
    prompt, _ = env.reset(seed=7)
    assert env.step(prompt.removeprefix("task "))[1:4] == (1.0, True, False)
    with pytest.raises(ValueError, match="at least one task"):
        OneTurn([], ExactMatch())


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"task file '.*tasks\.jsonl' is not a text in UTF-8.*\(key some\.key\)"):
        read_tasks(str(file), "some.key")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, r"there is no task file '.*' \(key some.key\)"),
        ("", r"is empty \(key some.key\)"),
        ('\n{"prompt": "a", "answer": "b"}\n{"prompt"\n', r"line 3 of '.*' is not JSON"),
        ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", r"line 1 of .* is not JSON.*\(key some.key\)"),
        ('{"question": "a"}', r'line 1 of .* is not a task; write \{"prompt"'),
        ('{"prompt": "a"}', r"line 1 of .* has no answer, which the scorer needs \(key some.key\)"),
    ],
)
def test_files_that_hold_no_tasks(tmp_path: Path, lines: str | None, message: str) -> None:
    if lines is not None:
        (tmp_path / "tasks.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        read_tasks(str(tmp_path / "tasks.jsonl"), "some.key", needs_answer=True)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_task(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n', "utf-8-sig")
    assert read_tasks(str(tmp_path / "tasks.jsonl"), "key") == [Task("1 + 1", "2")]


def test_tasks_are_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "tasks.jsonl", [{"prompt": "1 + 1", "answer": 2}, {"prompt": "Write."}])
    assert read_tasks(path, "") == [Task("1 + 1", "2"), Task("Write.")]
    odd = "a\u2028b\u0085c"  # which end lines of text, and need no escape in JSON
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": odd}, ensure_ascii=False), "utf-8")
    assert read_tasks(str(tmp_path / "odd.jsonl"), "") == [Task(odd, None)]


def test_tasks_alone_are_prompts_and_whole_replies(tiny_folder: Path, tmp_path: Path, sums: str) -> None:
    held_out = file_of(tmp_path / "held_out.jsonl", [{"prompt": "Now."}])
    tasks = TaskSet(sums, Letters(), held_out=held_out, system="Add.")
    rollout, validation = collect(tiny_folder, envs=[tasks], groups=GroupRollout(3, 4, 2))
    assert len(rollout.turns) == 12
    tokenizer = Learner(tiny_folder).tokenizer
    for sample, turn in zip(rollout.samples, rollout.turns, strict=True):
        assert turn.observation in {entry["prompt"] for entry in SUMS}
        text = tokenizer.decode(sample.segments[0].ids)
        said = f"<|im_start|>user\n{turn.observation}<|im_end|>\n<|im_start|>assistant\n"
        assert text == f"<|im_start|>system\nAdd.<|im_end|>\n{said}"  # whatever think says
        assert turn.action == turn.reply.strip()
        assert (turn.env_reward, turn.terminated, turn.bootstrap) == (len(turn.action), True, None)
    by_group = {turn.group: turn.observation for turn in rollout.turns}
    assert [by_group[turn.group] for turn in rollout.turns] == [turn.observation for turn in rollout.turns]
    assert len(set(by_group.values())) > 1
    assert [result.turns for result in validation] == [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("memory", [WindowMemory(2), pytest.param(FullMemory(), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": GroupRollout(2, 12, 3)},
        pytest.param({"num_envs": 12, "turns_per_env": 4}, marks=pytest.mark.slow),
    ],
)
def test_tasks_and_environments_are_played_in_one_rollout(
    tiny_folder: Path, sums: str, memory: Any, sizes: dict[str, Any]
) -> None:
    if "groups" not in sizes:
        sizes = sizes | {"mini_batch_turns": 12}
    guess = EnvConfig("agentrl_envs:GuessNumber-v0", {"highest": 9})
    settings = {"envs": [guess, EnvConfig("agentrl_envs:Bandit-v0"), TaskSet(sums)]}
    *rollouts, validation = collect(tiny_folder, 2, memory=memory, **settings, **sizes)
    for rollout in rollouts:
        kinds = {}
        for turn in rollout.turns:
            kind = "task" if "+" in turn.observation else "bandit" if "Weather" in turn.observation else "guess"
            kinds.setdefault(turn.group if turn.group is not None else turn.env, set()).add(kind)
        assert all(len(kind) == 1 for kind in kinds.values())
        counts = Counter(kind for (kind,) in kinds.values())
        assert sum(counts.values()) == 12
        assert min(counts.values()) >= 3
        valid = [turn for turn in rollout.turns if "+" in turn.observation]
        assert all(turn.action == turn.reply.strip() for turn in valid)
    assert {result.turns for result in validation} > {1}


BANDIT = "agentrl_envs:Bandit-v0"


@pytest.mark.parametrize(
    ("sources", "keys"),
    [
        ({}, ["data.init_args.env)", "data.init_args.envs)"]),
        ({"envs": []}, ["data.init_args.env)", "data.init_args.envs)"]),
        ({"env": EnvConfig(BANDIT), "envs": [EnvConfig(BANDIT)]}, ["data.init_args.env ", "data.init_args.envs "]),
        ({"env": EnvConfig(BANDIT, share=-1)}, ["data.init_args.env.share"]),
        ({"env": EnvConfig(BANDIT, share=math.nan)}, ["data.init_args.env.share"]),
        ({"env": EnvConfig(BANDIT, share=math.inf)}, ["data.init_args.env.share"]),
        ({"env": EnvConfig(BANDIT, retries=-1)}, ["data.init_args.env.retries"]),
        ({"envs": [EnvConfig(BANDIT), TaskSet("tasks.jsonl", share=0)]}, ["data.init_args.envs[1].share"]),
        ({"envs": [EnvConfig(BANDIT, retries=-1), TaskSet("tasks.jsonl")]}, ["data.init_args.envs[0].retries"]),
        ({"envs": [EnvConfig(BANDIT), TaskSet("tasks.jsonl", retries=-1)]}, ["data.init_args.envs[1].retries"]),
        (
            {"envs": [TaskSet("tasks.jsonl", scorer_timeout_seconds=0)]},
            ["data.init_args.envs[0].scorer_timeout_seconds"],
        ),
    ],
)
def test_sources_that_cannot_be_played_are_refused_with_their_keys(sources: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ValueError, match=r"data\.init_args\.env") as error:
        RolloutDataModule(**sources)
    for key in keys:
        assert key in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (EnvConfig("agentrl_envs:NoSuch-v0"), "id"),
        (EnvConfig(BANDIT, {"arms": 9}), "kwargs"),
        (TaskSet("nowhere.jsonl"), "path"),
        (TaskSet("sums.jsonl", held_out="nowhere.jsonl"), "held_out"),  # told before anything is played
    ],
)
def test_a_wrong_source_among_several_is_told_by_its_place(
    wrong: Any, key: str, sums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = RolloutDataModule(envs=[EnvConfig(BANDIT), wrong])
    with pytest.raises(ValueError, match=rf"data\.init_args\.envs\[1\]\.{key}"):
        data.setup("fit")


def test_the_label_of_a_checkpoint_does_not_depend_on_how_sources_are_given() -> None:
    """As it was written before there was a list, so checkpoints of that time go on."""
    sources = [EnvConfig(BANDIT, {"arms": 3}, share=2), EnvConfig("Varied-v0"), TaskSet("sums.jsonl", share=3)]

    def origin(**given: Any) -> str:
        data = RolloutDataModule(**given, seed=5)
        return origin_of(data.pool, data.sizes, data.seed)

    assert origin(envs=sources) == (
        "agentrl_envs:Bandit-v0 with {'arms': 3} (share 2) and Varied-v0 with {} (share 1) and tasks of sums.jsonl "
        "(share 3), seed 5"
    )
    assert origin(env=sources[0]) == origin(envs=sources[:1]) == "agentrl_envs:Bandit-v0 with {'arms': 3}, seed 5"


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0], [3.0, 1.0], [0.5, 0.25, 0.125]])
def test_any_stretch_of_numbers_has_its_share_of_every_source(shares: list[float]) -> None:
    pool = EnvPool([EnvConfig("some", share=share) for share in shares])
    kinds = torch.tensor([pool.kind(number) for number in range(600)])
    for step in (1, 2, 4):  # ranks take every so many-th number
        own = kinds[1::step]
        for kind, share in enumerate(shares):
            counts = (own == kind).long().cumsum(0)
            for length in (16, 64, 100):
                found = counts[length:] - counts[:-length]
                assert (found - length * share / sum(shares)).abs().max() < 3


class Busy(Scorer):
    """A server that refuses so many requests before it answers."""

    needs_answer = False

    def __init__(self, refuses: int, score: Any = 0.5) -> None:
        self.refuses, self.given = refuses, score

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        self.refuses -= 1
        if self.refuses >= 0:
            raise ConnectionError("busy")
        return self.given


@pytest.mark.parametrize(("retries", "refuses", "right"), [(2, 2, True), (2, 3, False), (0, 1, False)])
def test_a_score_that_fails_is_asked_for_again(tmp_path: Path, retries: int, refuses: int, right: bool) -> None:
    worker = TaskSet(str(_file(tmp_path)), Busy(refuses), retries=retries).make_worker()
    asked = worker.reset_now(Start(0, 0, 3)).observation
    if not right:
        with pytest.raises(EnvError, match="busy"):
            asyncio.run(worker.step("7"))
        return
    with pytest.warns(UserWarning, match="trying again"):
        assert asyncio.run(worker.step("7")).reward == 0.5
    assert worker.take_errors() == ("ConnectionError",) * refuses
    assert asked in [task["prompt"] for task in SUMS]


class Silent(Busy):
    """A server that leaves so many requests without an answer."""

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        self.refuses -= 1
        if self.refuses >= 0:
            time.sleep(3600)
        return self.given


def test_scorer_that_never_answers_is_asked_again_and_then_is_an_error(tmp_path: Path) -> None:
    tasks = TaskSet(str(_file(tmp_path)), Silent(1), retries=20, scorer_timeout_seconds=0.2)
    sentence = "the scorer Silent took longer than 0.2 s, the limit set by scorer_timeout_seconds"
    with ThreadPoolExecutor(1) as executor:
        worker = tasks.make_worker(executor)
        worker.reset_now(Start(0, 0, 3))
        with pytest.warns(UserWarning, match=f"{sentence}.*trying again"):
            assert asyncio.run(worker.step("7")).reward == 0.5
        tasks.scorer.refuses, worker.retries = 2, 1
        worker.reset_now(Start(0, 1, 3))
        with pytest.raises(EnvError, match=sentence) as error:
            asyncio.run(worker.step("7"))
    assert error.value.kind == "timeout"


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["judge", "scorer"])
def test_process_ends_beside_a_judge_or_scorer_that_never_answers(tmp_path: Path, silent: str) -> None:
    """Without waiting for their threads."""
    script = f"""
import asyncio, time, warnings
from concurrent.futures import ThreadPoolExecutor
from lightning_agentrl.episodes.env_worker import Start
from lightning_agentrl.episodes.judge import one_verdict
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout import Judge, TaskSet
from tests.episodes.test_tasks import Silent

class SilentJudge(Judge):
    async def judge(self, turn):
        await asyncio.to_thread(time.sleep, 3600)

loop = LoopThread()
if {silent == "judge"}:
    judge = SilentJudge()
    judge.timeout = 0.2
    asked = one_verdict(None, judge)
else:
    worker = TaskSet({str(_file(tmp_path))!r}, Silent(1), retries=0, scorer_timeout_seconds=0.2).make_worker()
    worker.reset_now(Start(0, 0, 3))
    asked = worker.step("7")
try:
    loop.run(asked)
except RuntimeError as error:
    print(error)
loop.stop()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert f"the {silent}" in done.stdout, done.stderr
    assert "took longer than 0.2 s" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (float("nan"), "the scorer Busy gave the reward nan"),
        pytest.param(10**400, "the scorer Busy gave the reward inf", id="that no float holds"),
    ],
)
def test_a_score_that_is_not_finite_is_told_with_its_scorer(tmp_path: Path, score: float, sentence: str) -> None:
    tasks = TaskSet(str(_file(tmp_path)), Busy(0, score), retries=0)
    tasks.key = "data.init_args.envs[1]"
    tasks.start(torch.device("cpu"))
    worker = tasks.make_worker()
    worker.reset_now(Start(0, 0, 3))
    with pytest.raises(EnvError, match=sentence):
        asyncio.run(worker.step("7"))


def _file(folder: Path) -> Path:
    file = folder / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, SUMS)))
    return file
