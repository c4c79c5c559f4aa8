"""Behaviour cloning: what is trained on, that it is learned, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_agentrl.agents import KL, CloneAgent, Optim, PPOAgent
from lightning_agentrl.agents.optim import Schedule, Schedules
from lightning_agentrl.callbacks import PolicyFolder, TurnLog
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    GroupRollout,
    Prepared,
    PromptFormat,
    Recorded,
    RolloutDataModule,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.rollout.demonstrations import ClonedTurns, Demonstration, Expert, chosen
from lightning_agentrl.types import Rollout
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.rollout import cloning_ranks
from tests.started import together
from tests.tiny import tiny_model_folder, tiny_vision_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("clones"), vocab_words=["left right Do what the sign says."] * 20)


def signs(fault: str = "", **settings: Any) -> RolloutDataModule:
    return make_data(
        env=EnvConfig("tests.signs:Signs-v0", {"fault": fault}),
        num_envs=8,
        memory=settings.pop("memory", WindowMemory(0)),
        validation=ValidationConfig(episodes=32, num_envs=16),
        **settings,
    )


def cloning(folder: Path, **settings: Any) -> CloneAgent:
    optim = Optim(lr_actor=1e-2, schedule=Schedules(actor=Schedule("linear")))
    return CloneAgent(str(folder), **{"demonstrations": Expert(30), "optim": optim, **settings})


def held_out(folder: Path, path: Path) -> float:
    trainer = make_trainer(path, 1, limit_val_batches=1.0)
    trainer.validate(cloning(folder), signs(), verbose=False)
    return float(trainer.callback_metrics["val/success"])


def test_a_model_that_clones_plays_as_the_scripted_player_does(folder, tmp_path):
    """And the folder that is written plays so too."""
    assert held_out(folder, tmp_path) < 0.5
    make_trainer(tmp_path, 12, [PolicyFolder(str(tmp_path / "clone"))]).fit(cloning(folder), signs())
    assert held_out(tmp_path / "clone", tmp_path) == 1.0


class Kept(CloneAgent):
    """Keeps what it is trained on."""

    batches: list[Rollout]

    def training_step(self, batch, batch_idx):
        self.batches = [*getattr(self, "batches", []), batch.rollout]
        super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="windows"),
        pytest.param({"memory": FullMemory(), "mini_batch_turns": 16}, id="growing", marks=pytest.mark.slow),
        pytest.param({"groups": GroupRollout(2, 2, 2)}, id="groups", marks=pytest.mark.slow),
    ],
)
def test_what_is_trained_are_replies_of_the_player_in_prompts_of_the_run(settings, folder, tmp_path):
    agent, data = Kept(str(folder), Expert(16), optim=Optim(lr_actor=0.0)), signs(**settings)
    make_trainer(tmp_path, 12).fit(agent, data)
    tokenizer = load_tokenizer(str(folder))
    close = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    trained = 0
    for rollout in agent.batches:
        assert len(rollout)
        for sample in rollout.samples:
            for reply, turn in zip(sample.actions, sample.turns, strict=True):
                assert turn.action == turn.observation == tokenizer.decode(reply.ids[:-1])
                assert turn.reward == 1.0
                assert reply.ids[-1] == close
            prompt = tokenizer.decode(sample.ids)
            assert "Do what the sign says." in prompt
            assert prompt.endswith("assistant\n" + sample.turns[-1].action + "<|im_end|>")
            trained += len(sample.turns)
    assert trained >= 2 * 16 * 3


class Once(ClonedTurns):
    """Notes which samples it gives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[int] = []

    def _sample(self, place: int) -> Any:
        sample = super()._sample(place)
        self.given.append(next(k for k, own in enumerate(self.samples) if own is sample))
        return sample


def recorded_data(tmp_path: Path, folder: Path, **settings: Any) -> RolloutDataModule:
    data = signs(**settings)
    make_trainer(tmp_path, 3, [TurnLog(str(tmp_path / "run" / "turns"))]).fit(make_agent(folder), data)
    return data


def demonstrated(folder: Path, data: RolloutDataModule, tmp_path: Path, **settings: Any) -> list[Demonstration]:
    """Episodes as an agent loads them."""
    agent = cloning(folder, **settings)
    found: list[Demonstration] = []
    load = agent.demonstrations.load
    agent.demonstrations.load = lambda *given: found.extend(load(*given)) or found  # type: ignore[method-assign]
    make_trainer(tmp_path, 1).fit(agent, data)
    return found


def test_a_pass_takes_every_sample_once_and_follows_from_the_number_of_the_iteration(folder, tmp_path):
    data = signs()
    episodes = demonstrated(folder, data, tmp_path)
    source = Once(episodes, data, 0.5)
    rollouts: list[Prepared] = []
    for iteration in range(9):
        stream = SimpleNamespace(collector=SimpleNamespace(iteration=iteration))
        rollouts.append(source.next_rollout(cast(Any, stream)))
    count = len(source.samples)
    assert count == 90
    passes = [source.given[k : k + count] for k in range(0, len(source.given) - count, count)]
    assert len(passes) == 3
    assert all(sorted(one) == list(range(count)) for one in passes)
    assert passes[0] != passes[1]
    assert [len(one.rollout) for one in rollouts] == [32] * 9
    stream.collector.iteration = 5
    again = source.next_rollout(cast(Any, stream)).rollout
    assert [sample.ids for sample in again.samples] == [sample.ids for sample in rollouts[5].rollout.samples]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [WindowMemory(1), pytest.param(FullMemory(), marks=pytest.mark.slow)])
def test_a_recorded_run_is_cloned_token_by_token(memory, folder, tmp_path):
    logged: list[Rollout] = []

    class Noting(TurnLog):
        def on_rollout(self, trainer, agent, rollout):
            logged.append(rollout)
            super().on_rollout(trainer, agent, rollout)

    data = signs(memory=memory, mini_batch_turns=16)
    make_trainer(tmp_path, 3, [Noting(str(tmp_path / "run" / "turns"))]).fit(make_agent(folder), data)
    played = {sample.ids: sample for rollout in logged for sample in rollout.samples}
    episodes = demonstrated(folder, signs(memory=memory), tmp_path, demonstrations=Recorded(str(tmp_path / "run")))
    ends = sum(turn.done for rollout in logged for turn in rollout.turns)
    assert len(episodes) == ends > 8
    for episode in episodes:
        assert [turn.index for turn in episode.turns] == [0, 1, 2]
        assert episode.outcome == sum(turn.env_reward for turn in episode.turns)
        for sample in episode.samples:
            assert sample.action_positions == played[sample.ids].action_positions
            assert [t.reply for t in sample.turns] == [t.reply for t in played[sample.ids].turns]
    log = next((tmp_path / "run" / "turns").glob("rank*.jsonl"))
    lines = log.read_text().splitlines(keepends=True)
    lines.remove(next(line for line in lines if json.loads(line)["turn"] == 1))
    log.write_text("".join(lines))
    left = demonstrated(folder, signs(memory=memory), tmp_path, demonstrations=Recorded(str(tmp_path / "run")))
    assert len(left) == ends - 1  # an episode with a hole is none
    last = max(k for k, line in enumerate(lines) if json.loads(line)["stop"] == "env_done")
    failed = json.loads(lines[last]) | {"terminated": False, "truncated": True, "stop": "env_fault"}
    log.write_text("".join([*lines[:last], json.dumps(failed) + "\n", *lines[last + 1 :]]))
    left = demonstrated(folder, signs(memory=memory), tmp_path, demonstrations=Recorded(str(tmp_path / "run")))
    assert len(left) == ends - 2  # nor is one whose environment failed
    log.write_text("".join(lines).replace('"asked_again":false,', "").replace('"stop":null,', ""))
    with pytest.raises(ConfigError, match=r"run' lacks asked_again, stop \(iteration 1, environment 0, turn 0\)"):
        demonstrated(folder, signs(memory=memory), tmp_path, demonstrations=Recorded(str(tmp_path / "run")))


@pytest.mark.slow
def test_what_cannot_be_cloned_is_refused_in_a_sentence(folder, tmp_path):
    def refused(data: RolloutDataModule, model: Path = folder, **settings: Any) -> str:
        with pytest.raises(ConfigError) as error:
            make_trainer(tmp_path, 1).fit(cloning(model, **settings), data)
        data.teardown("fit")
        return str(error.value)

    assert "RuntimeError: no way from here" in refused(signs("raises"))
    assert "no scripted player" in refused(signs("none"))
    assert "'jump', which is not one of the offered actions" in refused(signs("jumps"))
    assert "returned 1 " in refused(signs("number"))
    assert "best has 3; lower min_return" in refused(signs(), min_return=3.5)
    recorded_data(tmp_path, folder)
    log = next((tmp_path / "run" / "turns").glob("rank*.jsonl"))
    (short := tmp_path / "short" / "turns").mkdir(parents=True)
    begun = [line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["turn"] < 2]
    (short / log.name).write_text("".join(begun))
    message = refused(signs(), demonstrations=Recorded(str(short.parent)))
    assert re.search(r"none of the \d+ episodes", message)
    assert f"'{short.parent}'" in message
    other = tiny_model_folder(tmp_path / "other", vocab_words=["up down and so on"] * 20)
    assert "another tokenizer" in refused(signs(), other, demonstrations=Recorded(str(tmp_path / "run")))


@pytest.mark.slow
def test_a_student_that_plays_is_pulled_to_its_teacher(folder, tmp_path):
    """One that already says what the teacher may say; what is never sampled cannot be learnt so."""
    for name, iterations in (("teacher", 12), ("student", 4)):
        make_trainer(tmp_path, iterations, [PolicyFolder(str(tmp_path / name))]).fit(cloning(folder), signs())
    gaps: list[float] = []

    class Student(PPOAgent):
        def log_dict(self, numbers, *args, **kwargs):
            gaps.extend(float(x) for name, x in numbers.items() if name == "kl/reference")
            super().log_dict(numbers, *args, **kwargs)

    kl = KL(reward=0.0, loss=1.0, reference=str(tmp_path / "teacher"), action_share=0.5)
    critic, optim = SharedCritic(), Optim(lr_actor=1e-3)
    student = Student(str(tmp_path / "student"), critic=critic, kl=kl, optim=optim, entropy_bonus=0.0)
    make_trainer(tmp_path, 12).fit(student, signs())
    assert sum(gaps[-6:]) / 6 < 0.6 * gaps[0], gaps  # an estimate from a few turns each


def test_models_that_cannot_read_the_rows_of_the_policy_are_refused(folder, tmp_path):
    """Ids of other tokens would be read as other text, by a critic too, and nothing would show it."""
    other = tiny_model_folder(tmp_path / "other", vocab_words=["up down and so on"] * 20)
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))

    def refused(agent: PPOAgent) -> str:
        with pytest.raises(ValueError, match="model") as caught:
            make_trainer(tmp_path, 1).fit(agent, signs())
        return str(caught.value)

    for model, wrong in ((other, "another tokenizer"), (short, "reads 60 tokens")):
        message = refused(PPOAgent(str(folder), critic=SharedCritic(), kl=KL(loss=1.0, reference=str(model))))
        assert wrong in message
        assert "model.init_args.kl.reference" in message
        message = refused(PPOAgent(str(folder), critic=SeparateCritic(str(model))))
        assert wrong in message
        assert "model.init_args.critic.init_args.model" in message
    message = refused(PPOAgent(str(folder), critic=SeparateCritic(str(tmp_path / "nothing"))))
    assert "no model folder" in message
    assert "model.init_args.critic.init_args.model" in message


@pytest.mark.slow
def test_episodes_are_chosen_by_their_return(folder, tmp_path):
    data = recorded_data(tmp_path, folder)
    episodes = demonstrated(folder, data, tmp_path, demonstrations=Recorded(str(tmp_path / "run")))
    returns = sorted(episode.outcome for episode in episodes)
    assert returns[0] < returns[-1]
    assert [e.outcome for e in chosen(episodes, returns[-1])] == [r for r in returns if r == returns[-1]]


@pytest.mark.slow  # two processes
def test_two_processes_tell_of_all_episodes_that_they_clone(tmp_path):
    together(2, cloning_ranks.run, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    told = "cloning 7 turns of 3 of 5 episodes, with a mean return of 2; one pass takes 10.0 iterations"
    assert first[0] == second[0] == told
    assert first[1] == "none of 5 episodes has a return of at least min_return 9, and the best has 3; lower min_return"
    assert "process 1 has none of the 2 episodes" in second[2]
    assert "trainer.devices" in second[2]
    assert "no whole episode" in first[3]
    assert {second[1], first[2], second[3]} == {"said by another process"}
    assert (first[4], second[4]) == (6, 58)  # of 64 turns: as 10 to 90, so that no episode is taken more often


@pytest.mark.slow
def test_a_model_that_sees_clones_a_player_of_pictures(tmp_path):
    folder = tiny_vision_folder(tmp_path / "sees", "qwen3_vl", ["up down left right"] * 50)
    env = EnvConfig("agentrl_envs:GridWorldImage-v0", {"cell_px": 16})
    prompt = PromptFormat(think=False, max_prompt_tokens=400)
    losses: list[float] = []

    class Losses(CloneAgent):
        def log_dict(self, numbers, *args, **kwargs):
            losses.extend(float(x) for name, x in numbers.items() if name == "clone/cross_entropy")
            super().log_dict(numbers, *args, **kwargs)

    agent = Losses(str(folder), Expert(8), optim=Optim(lr_actor=1e-2))
    data = make_data(env=env, prompt=prompt, memory=WindowMemory(0))
    make_trainer(tmp_path, 6, [PolicyFolder(str(tmp_path / "clone"))], precision="32-true").fit(agent, data)
    assert losses[-1] < 0.5 * losses[0]
    assert load_causal_lm(str(tmp_path / "clone")).config.model_type == load_causal_lm(str(folder)).config.model_type


@pytest.mark.slow
def test_a_run_that_is_resumed_clones_what_the_whole_one_cloned(folder, tmp_path):
    def weights(agent: CloneAgent) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in agent.parameters()]

    optim = Optim(lr_actor=1e-3)
    whole, first, again = (cloning(folder, optim=optim) for _ in range(3))
    make_trainer(tmp_path, 4).fit(whole, signs())
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(first, signs())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    make_trainer(tmp_path, 4).fit(again, signs(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))
