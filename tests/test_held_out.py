"""The held-out tasks of the laboratory and their judge: games that keep their promises, and a page by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.laboratory.arms import Arm, agent_of, rollouts
from benchmarks.laboratory.cloning import PROMPT, random_model
from benchmarks.laboratory.fits import quiet_trainer
from benchmarks.laboratory.games import GAMES, WAIT
from benchmarks.laboratory.held_out import HELD_OUT, TASKS, NoisyPlayer, Task
from benchmarks.laboratory.judge import (
    EPISODES,
    EVERY,
    PLAYED,
    SEEDS,
    SETTINGS,
    advice,
    arms,
    key,
    play_held_out,
    record,
    restore,
)
from benchmarks.laboratory.judge_report import best_of, like_best, page, paired
from benchmarks.laboratory.policy import prompts_of
from benchmarks.laboratory.records import save
from benchmarks.laboratory.side_by_side import SideBySide
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.rollout import ValidationConfig


def played(task: Task, seed: int, noise: float = 0.0) -> tuple[list[tuple[str, float]], bool]:
    """Return what is seen and earned in each turn of an episode, and whether it succeeded."""
    env, rng = task.make(), np.random.default_rng(seed)
    (text, info), over = env.reset(seed=seed), False
    found = [(str(text), 0.0)]
    while not over:
        move = env.moves[rng.integers(len(env.moves))] if rng.random() < noise else env.solver()()
        text, reward, terminated, truncated, info = env.step(move)
        over = terminated or truncated
        found.append((str(text), reward))
    assert len(found) <= env.max_turns + 1
    return found, info["success"]


def test_there_are_ten_tasks_of_all_games():
    assert len(TASKS) == 10
    assert {task.game for task in TASKS.values()} == {game.__name__ for game in GAMES}


@pytest.mark.parametrize("name", TASKS)
def test_equal_seeds_are_equal_episodes_and_others_are_not(name):
    task = TASKS[name]
    assert played(task, 3, 0.5) == played(task, 3, 0.5)
    assert len({played(task, seed, 0.5)[0][0] for seed in range(20)}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_an_expert_without_mistakes_succeeds_and_a_random_player_seldom(name):
    """In 200 episodes; wind throws even the best one off now and then."""
    wins = [played(TASKS[name], seed)[1] for seed in range(200)]
    assert np.mean(wins) > 0.95
    assert np.mean([played(TASKS[name], seed, 1.0)[1] for seed in range(200)]) < 0.3


@pytest.mark.parametrize("name", TASKS)
def test_doing_nothing_does_not_succeed_and_ends(name):
    env = TASKS[name].make()
    env.reset(seed=0)
    for _ in range(env.max_turns):
        _, _, terminated, truncated, info = env.step(WAIT)
        if terminated or truncated:
            break
    assert terminated or truncated
    assert not info["success"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_have_the_noise_and_the_words_of_their_task(name, tmp_path):
    task = TASKS[name]
    tokenizer = load_tokenizer(str(random_model(task, tmp_path)))
    found = NoisyPlayer(task, 600).load(None, tokenizer)
    assert len(found) == 600
    ids = {i for one in found for sample in one.samples for segment in sample.segments for i in segment.ids}
    assert tokenizer.unk_token_id not in ids
    assert {len(sample.actions[0].ids) for one in found for sample in one.samples} == {task.reply_tokens}
    longest = max(len(one.samples[0].segments[0].ids) for one in found)
    assert longest + task.reply_tokens <= PROMPT.max_prompt_tokens
    env = task.make()
    text, _ = env.reset(seed=0)
    assert found[0].samples[0].segments[0].ids == prompts_of(tokenizer, [str(text)], PROMPT)[0]


def test_whole_groups_come_to_as_many_turns_as_an_iteration_has():
    assert tuple(arms(10.0)) == SETTINGS
    assert arms(10.0)["groups"].episodes == 48  # 480 turns; 56 episodes would be 560
    assert arms(1.0)["groups"].episodes == 512
    assert arms(1000.0)["groups"].episodes == 8
    made = {key(task, arm, seed) for task in TASKS.values() for arm in arms(9.0).values() for seed in range(3)}
    assert len(made) == 10 * 6 * 3


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["groups_by_state", pytest.param("warm_up", marks=pytest.mark.long)])
def test_a_run_is_the_same_again_and_ends_when_its_turns_are_played(setting, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.laboratory.judge.PLAYED", 2048)
    task = TASKS["sorting"]
    model = random_model(task, tmp_path)
    first, second = (play_held_out(task, model, arms(20.0)[setting], 1) for _ in range(2))
    assert first["curve"] == second["curve"]
    assert first["turns"] == second["turns"]
    assert first["turns"][-2] < 2048 <= first["turns"][-1]
    assert all(b - a < 2 * EVERY for a, b in zip(first["turns"], first["turns"][1:], strict=False))
    if setting == "warm_up":
        assert first["curve"][1] == first["curve"][0]  # the policy does not move
        assert first["turns"] == [0, 1024, 2048]


@pytest.mark.slow
def test_episodes_side_by_side_are_those_of_the_package(tmp_path):
    """In 512 and 256 episodes of a random model that ends replies early, within four standard errors; twice alike."""
    task = replace(TASKS["harvest"], reply_tokens=3)
    model = random_model(task, tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        lm.lm_head.weight.mul_(20)
    lm.save_pretrained(model)
    beside = SideBySide(task, model, held_out_seeds()[:512])
    found = beside.play()
    assert found == beside.play()
    folder = tmp_path / "trainer"
    trainer = quiet_trainer(folder, 1, [])
    trainer.limit_val_batches = 1
    agent = agent_of(model, Arm(), SeparateCritic())
    held_out = ValidationConfig(episodes=256, num_envs=64)
    (numbers,) = trainer.validate(agent, rollouts(task, Arm(), 0, held_out), verbose=False)
    assert 0 < numbers["val/return"] < 1
    assert abs(found.total_reward - numbers["val/return"]) < 4 * numbers["val/return_error"] * 1.5**0.5


def test_held_out_episodes_are_played_beside_each_other():
    data = rollouts(TASKS["wind"], arms(18.0)["long_cuts"], 0, HELD_OUT)
    assert data.engine.max_batch == HELD_OUT.num_envs
    assert rollouts(TASKS["wind"], arms(18.0)["long_cuts"], 0).engine.max_batch == 8


def test_paired_differences_by_hand():
    """Of 1, 2 and 3: mean 2, deviation 1, and 4.303 of it over the root of 3 to both sides."""
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.value, found.low) == (2.0, pytest.approx(2 - 4.303 / 3**0.5))
    scores = {"a": [0.5, 0.6, 0.7], "b": [0.4, 0.5, 0.601], "c": [0.6, 0.5, 0.6]}
    assert best_of(scores) == "a"
    assert like_best(scores, "c")
    assert not like_best(scores, "b")


def of_task(**at_the_end: float) -> dict:
    runs = {
        setting: [{"curve": [0.2, 0.2 + value + k / 1000], "turns": [0, PLAYED]} for k in range(3)]
        for setting, value in at_the_end.items()
    }
    start = {"return": 0.2, "expert": 1.2, "success": 0.2, "mean_turns": 9.0}
    return {"about": "a game", "start": start, "runs": runs}


def test_the_page_says_how_good_the_advice_was():
    tasks = {"wind": of_task(groups=0.4, short_cuts=0.2), "road": of_task(groups=0.1, short_cuts=0.3)}
    record = {"played": PLAYED, "tasks": tasks, "advice": {"wind": "groups", "road": "groups"}}
    text = page(json.loads(json.dumps(record)))
    assert "| wind | `groups` | `groups` |  | **the best** |" in text
    assert "| road | `groups` | `short_cuts` | 0.100 (+0.100 to +0.100) | **worse** |" in text
    assert "the best or like it in 1 of 2 tasks" in text
    assert "| wind | **0.201** | 0.101 | `groups` | +0.100 (+0.100 to +0.100) over `short_cuts` |" in text
    assert "| always `short_cuts` | 0.126 | 0.050 | 0.100 | 1 of 2 |" in text
    assert "None yet." in page({**record, "advice": {}})


def test_advice_that_names_no_setting_is_refused(tmp_path):
    assert advice(tmp_path) == {}
    (tmp_path / "advice.json").write_text('{"wind": "long"}')
    with pytest.raises(ValueError, match="wind: long"):
        advice(tmp_path)


def test_runs_that_were_kept_come_back_under_their_own_seeds(tmp_path):
    """Also where a seed between them is not whole, as of a process that was stopped."""
    task, runs = TASKS["wind"], tmp_path / "runs"
    save(runs / f"{task.name}-{EPISODES}.json", json.dumps(of_task()["start"]))
    for setting, arm in arms(9.0).items():
        for seed in range(SEEDS):
            if (setting, seed) != ("groups", 1):
                save(runs / f"{key(task, arm, seed)}.json", json.dumps({"curve": [seed]}))
    kept = tmp_path / "advise.json"
    save(kept, json.dumps(record(runs, kept)))
    restore(tmp_path / "empty", kept)
    for arm in arms(9.0).values():
        for seed in range(SEEDS):
            file = tmp_path / "empty" / f"{key(task, arm, seed)}.json"
            assert not file.exists() or json.loads(file.read_text()) == {"curve": [seed]}
    arm = arms(9.0)["groups"]
    save(runs / f"{key(task, arm, 1)}.json", json.dumps({"curve": [1]}))
    assert record(runs, kept)["tasks"]["wind"]["runs"]["groups"] == [{"curve": [seed]} for seed in range(SEEDS)]
