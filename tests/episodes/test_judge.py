"""Judges: what they add to rewards, by hand."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_agentrl.episodes.interaction import TurnInteraction
from lightning_agentrl.episodes.judge import Judge, JudgedTurn, ModelJudge, PatternJudge
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.loading import read_images
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule
from lightning_agentrl.types import input_of
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.models.seen import picture
from tests.rollout.scripted import Learner, Scripted, workplace
from tests.tiny import CHATML, tiny_model_folder, tiny_tokenizer, tiny_vision_folder

TURN = JudgedTurn("Find the key.", "a door", (), "THINK: the key\nACTION: open", "the key", "open", True, 0.5)


class Counting(Judge):
    """Its n-th verdict is n tenths."""

    def __init__(self, *others: float) -> None:
        self.turns: list[JudgedTurn] = []
        self.others = others

    async def judge(self, turn: JudgedTurn) -> float:
        self.turns.append(turn)
        return self.others[len(self.turns) - 1] if self.others else len(self.turns) / 10


def test_a_verdict_is_added_to_the_reward_and_told(tiny_folder):
    judge = Counting()
    with workplace(tiny_folder, [Scripted(3)]) as place:
        place.sessions[0].judge = judge
        turns = place.collect(4).turns
    assert [turn.reward - turn.env_reward for turn in turns] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [turn.metrics["judge"] for turn in turns] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [turn.reply for turn in judge.turns] == [turn.reply for turn in turns]
    assert [turn.observation for turn in judge.turns] == [turn.observation for turn in turns]


@pytest.mark.parametrize("verdict", [torch.tensor(0.5), np.float32(0.5), np.array(0.5)])
def test_a_verdict_of_any_number_is_one_that_can_be_logged(tiny_folder, verdict):
    with workplace(tiny_folder, [Scripted(3)]) as place:
        place.sessions[0].judge = Counting(verdict)
        (turn,) = place.collect(1).turns
    assert json.dumps([turn.reward, turn.metrics]) == '[1.5, {"judge": 0.5}]'


class Busy(Counting):
    """Raises whenever it is asked for the second turn for the first so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def judge(self, turn: JudgedTurn) -> float:
        if len(self.turns) == 1 and self.times:
            self.times -= 1
            raise OSError("the server is busy")
        return await super().judge(turn)


def test_a_judge_that_raises_is_asked_again(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions[0].judge, place.sessions[0].worker.retries = Busy(2), 2
        said = r"judge raised OSError: the server is busy \(key judge\) \(environment 0, episode 0 .*\); trying again"
        with pytest.warns(UserWarning, match=said):
            turns = place.collect(4).turns
    assert [turn.metrics["judge"] for turn in turns] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [turn.env_errors for turn in turns] == [(), ("OSError", "OSError"), (), ()]
    assert not any(turn.lost for turn in turns)


def test_a_judge_that_raises_too_often_costs_the_episode(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions[0].judge, place.sessions[0].worker.retries = Busy(2), 1
        turns = place.collect(4).turns
    assert [turn.lost for turn in turns if turn.lost] == [("OSError",)]
    assert not any(turn.env_errors for turn in turns)  # which are those that were recovered from
    assert all(turn.metrics.get("judge") for turn in turns)


class Silent(Counting):
    """Never answers when it is asked for the second turn for the first so many times."""

    def __init__(self, times: int, blocks: bool) -> None:
        super().__init__()
        self.times, self.blocks = times, blocks

    async def judge(self, turn: JudgedTurn) -> float:
        if len(self.turns) == 1 and self.times:
            self.times -= 1
            await (asyncio.to_thread(time.sleep, 3600) if self.blocks else asyncio.sleep(3600))
        return await super().judge(turn)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(("times", "lost"), [(1, ()), (2, ("timeout",))])
def test_judge_that_never_answers_is_asked_again_and_then_costs_the_episode(tiny_folder, times, lost, blocks):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        (session,) = place.sessions
        session.judge, session.worker.retries = Silent(times, blocks), 1
        session.judge.timeout = 0.2
        with pytest.warns(UserWarning, match=r"took longer than 0.2 s, the limit set by judge_timeout_seconds"):
            turns = place.collect(3).turns
    assert [turn.lost for turn in turns if turn.lost] == ([lost] if lost else [])
    assert [turn.env_errors for turn in turns if turn.env_errors] == ([] if lost else [("timeout",)])


def test_judge_timeout_of_a_config_reaches_the_sessions(tiny_folder):
    env = EnvConfig("agentrl_envs:Bandit-v0", judge=Counting(), judge_timeout_seconds=7.0)
    data = RolloutDataModule(env, num_envs=1, turns_per_env=2, mini_batch_turns=2)
    data.setup("fit")
    Learner(tiny_folder).connect(data)
    try:
        data.stream.collect()
        assert [session.judge.timeout for session in data.sessions] == [7.0]
    finally:
        data.teardown("fit")
    with pytest.raises(ValueError, match=r"env\.judge_timeout_seconds must be above 0 or null, got 0"):
        RolloutDataModule(EnvConfig("agentrl_envs:Bandit-v0", judge_timeout_seconds=0))


@pytest.mark.parametrize("verdict", [math.nan, pytest.param(10**400, id="no float")])
def test_a_verdict_that_is_no_reward_costs_the_episode(tiny_folder, verdict):
    with workplace(tiny_folder, [Scripted(3)]) as place:
        place.sessions[0].judge = Counting(0.0, verdict, 0.0, 0.0, 0.0)
        turns = place.collect(3).turns
        (last,) = [turn for turn in turns if turn.lost]
        shown = place.text(input_of(last.bootstrap).ids)
    assert last.lost == ("reward",)
    assert all(math.isfinite(turn.reward) for turn in turns)
    assert "step 1" in shown  # the state after the last sound turn, though the environment has gone on
    assert "step 2" not in shown


def test_a_reply_that_is_asked_for_again_is_not_judged(tiny_folder):
    judge = Counting()
    asking = TurnInteraction(max_reply_tokens=2, ask_again=10)
    env = Scripted(3)
    env.actions = {"never said": ""}
    with workplace(tiny_folder, [env], interaction=asking) as place:
        place.sessions[0].judge = judge
        assert all(turn.asked_again for turn in place.collect(3).turns)
    assert not judge.turns


def test_a_pattern_is_searched_in_the_whole_reply():
    def verdict(pattern: str) -> float:
        return asyncio.run(PatternJudge(pattern, -0.2).judge(TURN))

    assert [verdict("KEY"), verdict("(?-i:KEY)"), verdict("^ACTION"), verdict(r"key\s+ACTION")] == [
        -0.2,
        0.0,
        0.0,
        -0.2,
    ]
    with pytest.raises(ValueError, match="not a regular expression"):
        PatternJudge("(", 1.0)


def test_a_model_is_asked_and_its_last_number_counts(tmp_path, monkeypatch):
    judge = ModelJudge(str(tiny_model_folder(tmp_path)), "How good, from 0 to 10?", max_reply_tokens=8)
    judge.start(torch.device("cpu"))
    first = asyncio.run(judge.judge(TURN))
    assert asyncio.run(judge.judge(TURN)) == first
    assert 0.0 <= first <= 1.0
    numbers = {"7 of 10, no: 3.5": 0.35, "-2": 0.0, "\u22122": 0.0, "7-8": 0.8, "99": 1.0, "good": 0.0}
    fractions = {".5": 0.05, "it is .75.": 0.075, "5e-1": 0.05, "well...5": 0.5}
    for said, expected in (numbers | fractions).items():
        monkeypatch.setattr(judge._chat, "decode", lambda ids, said=said: said)
        assert asyncio.run(judge.judge(TURN)) == pytest.approx(expected)


def test_a_judge_reads_the_date_of_the_run(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    folder = tiny_model_folder(tmp_path, tokenizer=tokenizer)
    judge = ModelJudge(str(folder), "How good?", max_reply_tokens=8)
    source = EnvConfig("agentrl_envs:Bandit-v0", judge=judge)
    source.date = RunDate()
    source.date.now = datetime(2024, 7, 26)
    source.start(torch.device("cpu"))
    assert tokenizer.decode(judge._prompt(TURN).ids).startswith("26 Jul 2024")
    source.release()


def test_a_copy_of_a_judge_has_loaded_nothing(tmp_path):
    """Of the data module too, before a run and after it."""
    judge = ModelJudge(str(tiny_model_folder(tmp_path)), "How good, from 0 to 10?", max_reply_tokens=8)
    data = RolloutDataModule(EnvConfig("agentrl_envs:Bandit-v0", judge=judge))
    judge.start(torch.device("cpu"))
    verdict = asyncio.run(judge.judge(TURN))
    for copied in (copy.deepcopy(data).pool.sources[0].judge, pickle.loads(pickle.dumps(judge))):
        assert (copied.question, copied._engine) == (judge.question, None)
        copied.start(torch.device("cpu"))
        assert asyncio.run(copied.judge(TURN)) == verdict


def test_a_judge_sees_what_its_model_can_read(tmp_path):
    """Pixels are resized to what its own model reads; a model for text is asked about the rest."""
    policy = tiny_vision_folder(tmp_path / "policy", "qwen3_vl")
    other = tiny_vision_folder(tmp_path / "other", "smolvlm", image_side=2)
    image = read_images(str(policy)).read(picture(0))
    turn = replace(TURN, images=(image,))
    for folder, tokens in ((policy, [9]), (other, [4]), (tiny_model_folder(tmp_path / "text"), [])):
        judge = ModelJudge(str(folder), "How good?", max_reply_tokens=2)
        judge.start(torch.device("cpu"))
        assert [one.tokens for one in judge._prompt(turn).images] == tokens
        assert math.isfinite(asyncio.run(judge.judge(turn)))


def test_what_is_too_long_for_the_judge_is_cut(tmp_path):
    judge = ModelJudge(str(tiny_model_folder(tmp_path)), "How good?", max_reply_tokens=8)
    judge.start(torch.device("cpu"))
    long = JudgedTurn("", "a door " * 5000, (), "open " * 5000, "", "open", True, 0.0)
    assert math.isfinite(asyncio.run(judge.judge(long)))
    for part in ("task", "action"):  # of free text the action is the whole reply
        assert math.isfinite(asyncio.run(judge.judge(replace(TURN, **{part: "a door " * 5000}))))
    judge.question = "How good? " * 3000
    with pytest.raises(ConfigError, match=r"the question of the judge is longer.* \(key judge\.init_args\.question\)"):
        asyncio.run(judge.judge(TURN))


def test_a_judge_that_has_given_back_its_model_can_start_again(tmp_path):
    judge = ModelJudge(str(tiny_model_folder(tmp_path)), "How good, from 0 to 10?", max_reply_tokens=8)
    verdicts, before = [], set(threading.enumerate())
    for _ in range(2):
        judge.start(torch.device("cpu"))
        verdicts.append(asyncio.run(judge.judge(TURN)))
        judge.release()
        assert set(threading.enumerate()) <= before
        assert not {"LanguageModel", "TransformersEngine"} & {type(x).__name__ for x in vars(judge).values()}
    assert verdicts[0] == verdicts[1]
    judge.release()


class Failing(L.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        raise RuntimeError("as own code may")


@pytest.mark.slow
def test_a_run_that_has_ended_or_failed_has_its_judge_give_back_its_model(tmp_path):
    folder = str(tiny_model_folder(tmp_path))
    judge = ModelJudge(folder, "How good?", max_reply_tokens=2)
    data, before = make_data(env=EnvConfig("agentrl_envs:Bandit-v0", judge=judge)), set(threading.enumerate())
    for callbacks in ([], [], [Failing()]):
        with pytest.raises(RuntimeError, match="as own code") if callbacks else nullcontext():
            make_trainer(tmp_path, 1, callbacks).fit(make_agent(Path(folder)), data)
        begun = set(threading.enumerate()) - before
        assert "transformers-engine" not in {thread.name for thread in begun}


class Clinging(Counting):
    def release(self) -> None:
        raise OSError("the client is closed")


@pytest.mark.slow
def test_a_judge_that_fails_as_it_gives_back_is_only_a_warning(tmp_path):
    folder = tiny_model_folder(tmp_path)
    data = make_data(env=EnvConfig("agentrl_envs:Bandit-v0", judge=Clinging()))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"data\.init_args\.env raised OSError: the client is closed"):
            make_trainer(tmp_path, 1).fit(make_agent(folder), data)


def test_a_judge_belongs_to_a_source(tmp_path):
    judge = ModelJudge(str(tmp_path / "nowhere"), "How good?")
    source = EnvConfig("agentrl_envs:Bandit-v0", judge=judge)
    with pytest.raises(ValueError, match=r"nowhere.* \(key data\.init_args\.env\.judge\.init_args\.model\)"):
        source.start(torch.device("cpu"))
    assert judge.key == "data.init_args.env.judge"
    folder = tiny_model_folder(tmp_path / "model")
    for file in folder.glob("token*"):
        file.unlink()
    source = EnvConfig("agentrl_envs:Bandit-v0", judge=ModelJudge(str(folder), "How good?"))
    with pytest.raises(ConfigError, match=r"cannot be loaded \(key data\.init_args\.env\.judge\.init_args\.model\)"):
        source.start(torch.device("cpu"))
    assert PatternJudge("key", 1.0).key == "judge"
