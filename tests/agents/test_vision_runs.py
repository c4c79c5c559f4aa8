"""Runs of agents that see: the same turns, layouts, checkpoints and gradients as with text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.scoring import action_rows
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    GroupRollout,
    PromptFormat,
    RolloutDataModule,
    TaskSet,
    WindowMemory,
)
from lightning_agentrl.types import ImageChunk, Rollout, StopReason
from tests.agents.harness import Keeping, make_agent, make_data, make_trainer
from tests.tiny import tiny_vision_folder

GAME = "tests.seen_game:Corner-v0"
PROMPT = PromptFormat(think=False, max_prompt_tokens=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_folder(tmp_path_factory.mktemp("sees"), "qwen3_vl")


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_folder(tmp_path_factory.mktemp("sees"), request.param)


def data(**settings: Any) -> RolloutDataModule:
    return make_data(**{"env": EnvConfig(GAME), "prompt": PROMPT, **settings})


def weights(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in agent.named_parameters()}


@pytest.mark.parametrize(
    ("critic", "settings"),
    [
        pytest.param(SharedCritic(), {"memory": FullMemory(), "mini_batch_turns": 16}, id="growing"),
        pytest.param(SharedCritic(), {"memory": WindowMemory(1)}, id="window", marks=pytest.mark.slow),
        pytest.param(SeparateCritic(), {"memory": WindowMemory(0)}, id="critic of its own", marks=pytest.mark.slow),
        pytest.param(
            SharedCritic(),
            {"groups": GroupRollout(2, 2, 1), "memory": WindowMemory(1)},
            id="groups",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_policy_is_trained_on_what_it_saw(critic, settings, any_folder, tmp_path):
    agent = Keeping(str(any_folder), critic=critic)
    make_trainer(tmp_path, 2).fit(agent, data(**settings))
    seen = 0
    for rollout in agent.rollouts:
        assert rollout.scores.old_logps is not None
        ours, engines = rollout.scores.old_logps[rollout.action_mask], rollout.rollout_logps[rollout.action_mask]
        torch.testing.assert_close(ours, engines.to(ours.dtype), atol=1e-5, rtol=0)
        for sample in rollout.samples:
            images = sample.input.images
            assert all(isinstance(image, ImageChunk) and image.pixels is not None for image in images)
            assert len(images) >= len(sample.turns)
            assert all(turn.seen for turn in sample.turns)
            seen += len(images)
    assert seen >= 16


@pytest.mark.slow
def test_a_run_that_is_resumed_sees_what_the_whole_one_saw(folder, tmp_path):
    """Also the images of the history, of a growing sample, and of a rollout that was collected ahead."""
    for name, settings in {
        "growing": {"memory": FullMemory(), "mini_batch_turns": 16, "turns_per_env": 4},
        "window": {"memory": WindowMemory(2), "turns_per_env": 2, "mini_batch_turns": 8},
        "ahead": {"memory": WindowMemory(1), "max_staleness": 1, "turns_per_env": 2, "mini_batch_turns": 8},
    }.items():
        whole = make_agent(folder)
        make_trainer(tmp_path, 3).fit(whole, data(**settings))
        first = make_agent(folder)
        trainer = make_trainer(tmp_path, 2)
        trainer.fit(first, data(**settings))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        again = make_agent(folder)
        make_trainer(tmp_path, 3).fit(again, data(**settings), ckpt_path=tmp_path / f"{name}.ckpt", weights_only=True)
        for key, x in weights(whole).items():
            assert torch.equal(x, weights(again)[key]), (name, key)


def test_a_model_for_text_is_told_what_it_cannot_see(tiny_folder, tmp_path):
    with pytest.raises((ConfigError, ValueError), match="reads text only; choose a vision-language model"):
        make_trainer(tmp_path, 1).fit(make_agent(tiny_folder), data())


def test_more_images_than_a_prompt_may_have_are_told(folder, tmp_path):
    settings = {"env": EnvConfig(GAME, {"images": 3}), "prompt": replace(PROMPT, max_images=2)}
    with pytest.raises(ValueError, match="has 3 images, over the limit of 2"):
        make_trainer(tmp_path, 1).fit(make_agent(folder), data(**settings))


def test_a_history_with_more_images_than_a_prompt_may_have_is_told(folder, tmp_path):
    settings = {"memory": WindowMemory(3), "prompt": replace(PROMPT, max_images=2, max_prompt_tokens=1000)}
    with pytest.raises(ValueError, match=r"shows up to 3 turns, of which only 1 fit into prompts .* and 2 images"):
        make_trainer(tmp_path, 1).fit(make_agent(folder), data(**settings))


@pytest.mark.slow
def test_an_episode_ends_where_no_image_more_has_room(folder, tmp_path):
    """In a growing sample, which cannot leave the oldest out."""
    agent = Keeping(str(folder), critic=SharedCritic())
    settings = {"memory": FullMemory(), "mini_batch_turns": 16, "prompt": replace(PROMPT, max_images=2)}
    make_trainer(tmp_path, 2).fit(agent, data(env=EnvConfig(GAME, {"turns": 9}), **settings))
    turns = [turn for rollout in agent.rollouts for turn in rollout.turns]
    assert {turn.stop for turn in turns if turn.index == 1} == {StopReason.CONTEXT_LENGTH}
    assert max(turn.index for turn in turns) == 1
    assert max(len(sample.input.images) for rollout in agent.rollouts for sample in rollout.samples) == 2


@pytest.mark.slow
def test_sources_with_and_without_images_are_one_batch(folder, tmp_path):
    """Text, images and one-turn tasks are trained together, and each has the gradient that it has alone."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n')
    sources = [EnvConfig(GAME), EnvConfig(GAME, {"images": 0}), TaskSet(str(tasks))]
    agent = Keeping(str(folder), critic=SharedCritic())
    module = data(env=None, envs=sources, num_envs=6)
    make_trainer(tmp_path, 2).fit(agent, module)
    rollout = agent.rollouts[0]
    kinds = [module.pool.kind(sample.turns[0].env) for sample in rollout.samples]
    parts = [[row for row, kind in enumerate(kinds) if kind == one] for one in range(len(sources))]
    assert all(parts)
    assert {kind for kind, sample in zip(kinds, rollout.samples, strict=True) if sample.input.images} == {0}
    whole = gradients(agent, rollout, list(range(len(kinds))))
    alone = [gradients(agent, rollout, part) for part in parts]
    largest = max(float(x.abs().max()) for x in whole.values())
    for name, x in whole.items():  # norms round to float32 in any precision
        torch.testing.assert_close(sum(part[name] for part in alone), x, rtol=0, atol=1e-6 * largest)
    assert all(any(x.abs().max() > 1e-3 for x in part.values()) for part in alone)


def gradients(agent: PPOAgent, rollout: Rollout, rows: list[int]) -> dict[str, torch.Tensor]:
    """Of a fixed weighting of log-probs and values, with the micro-batches that the rows have by themselves."""
    agent.zero_grad()
    reader, models = agent.reader, agent.models
    own = action_rows(rollout)
    for index in reader.micro_batches([own[row] for row in rows]):
        packed = reader.pack([own[rows[i]] for i in index])
        hidden = models.actor.hidden(packed)
        logps = models.actor.token_scores(hidden, packed.targets, 1.0).logps
        weights = torch.cat([torch.linspace(-1, 2, len(own[rows[i]].logit_positions)) * (1 + rows[i]) for i in index])
        assert models.critic is not None
        ((logps + models.critic(packed, hidden)) * weights).sum().backward()
    return {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in agent.named_parameters()}
