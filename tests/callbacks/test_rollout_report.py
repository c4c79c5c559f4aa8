"""Episodes, histograms and pictures of each rollout reach the logger."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_agentrl.callbacks import RolloutReport
from lightning_agentrl.callbacks.rollout_report import episode_text, filmstrip, log_histogram, pick_episodes
from lightning_agentrl.rollout import EnvConfig, PromptFormat, TurnInteraction
from lightning_agentrl.types import StopReason
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer
from tests.types.samples import turn

SOLVED = {"terminated": True, "stop": StopReason.ENV_DONE, "success": True}
FAILED = {"truncated": True, "stop": StopReason.MAX_TURNS, "success": False}


def test_ended_episodes_are_shown_first_solved_and_failed_in_turn() -> None:
    turns = [
        turn(env=0, episode=0),  # goes on
        turn(env=1, episode=3, **FAILED),
        turn(env=1, episode=4, **FAILED),
        turn(env=2, episode=0, index=4),
        turn(env=2, episode=0, index=5, **SOLVED),
    ]
    picked = [[(t.env, t.episode, t.index) for t in episode] for episode in pick_episodes(turns, 4)]
    assert picked == [[(2, 0, 4), (2, 0, 5)], [(1, 3, 0)], [(1, 4, 0)], [(0, 0, 0)]]
    assert len(pick_episodes(turns, 1)) == 1


def test_an_episode_reads_as_text() -> None:
    text = episode_text(
        [
            turn(
                env=2,
                episode=5,
                index=3,
                observation="a wall\na door",
                reply="hm",
                action="wait",
                valid=False,
                reward=-0.1,
            ),
            turn(env=2, episode=5, index=4, reply="ACTION: open", reward=1.0, episode_return=1.0, **SOLVED),
        ]
    )
    assert text.splitlines() == [
        "environment 2, episode 5, turns 3 to 4: solved, env_done, return 1",
        "--- turn 3",
        "a wall",
        "a door",
        ">> hm",
        "action: wait   reward: -0.1   (the reply names no action, the default was taken)",
        "--- turn 4",
        "a door",
        ">> ACTION: open",
        "action: open   reward: 1",
    ]


def test_an_invalid_turn_is_told_as_what_it_was() -> None:
    refused = episode_text([turn(parsed_action="open", valid=False)])
    assert refused.endswith("action: open   reward: 0   (the environment refused it)")
    asked = episode_text([turn(action="", asked_again=True, valid=False, reward=-0.1)])
    assert asked.endswith("reward: -0.1   (the reply names no action, it is requested again)")


def test_pictures_become_a_strip() -> None:
    def png(height: int, width: int, grey: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((height, width, 3), grey, dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    strip = filmstrip([png(4, 3, 10), png(2, 5, 20)])
    assert strip.shape == (4, 3 + 2 + 5 + 2, 3)
    assert strip[:4, :3].min() == strip[:4, :3].max() == 10
    assert strip[:2, 5:10].min() == 20
    assert strip[2:, 5:10].max() == 0


ROUNDED, HUGE = [0.3, 0.1 + 0.2], [3e38, 3e38]


def test_rewards_of_any_size_can_be_drawn(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step, numbers in enumerate((ROUNDED, HUGE, [-3e38, 0.0, math.nan])):
        log_histogram([logger], "rewards", numbers, step)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0}).Reload()
    assert [event.histogram_value.num for event in events.Histograms("rewards")] == [2, 2, 2]


@pytest.mark.slow
def test_rewards_of_any_size_can_be_drawn_by_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    for step, numbers in enumerate((ROUNDED, HUGE)):
        log_histogram([logger], "rewards", numbers, step)
    import wandb

    shown = logger.experiment.summary["rewards"]
    wandb.finish()  # else the next logger in this process goes on with this run
    wandb.teardown()  # and offline
    assert sum(shown["values"]) == 2


@pytest.mark.slow
def test_tensorboard_gets_text_histograms_and_pictures(tiny_folder: Path, tmp_path: Path) -> None:
    keep = KeepRollouts()
    env = EnvConfig("agentrl_envs:BabyAIText-GoToObjS4-v0", {"max_turns": 3, "render_mode": "rgb_array"})
    data = make_data(
        env=env,
        prompt=PromptFormat(think=False, examples=False, max_prompt_tokens=900),
        interaction=TurnInteraction(max_reply_tokens=4),
    )
    logger = TensorBoardLogger(tmp_path)
    report = RolloutReport(episodes=2, every=2)
    make_trainer(tmp_path, 3, [report, keep], logger=logger).fit(make_agent(tiny_folder), data)
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0, "histograms": 0, "images": 0}).Reload()
    assert sorted(events.Tags()["tensors"]) == ["episode/0/text_summary", "episode/1/text_summary"]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("episode/0/text_summary")]
    rollouts = [keep.rollouts[0], keep.rollouts[2]]  # every second one
    assert texts == [f"```\n{episode_text(pick_episodes(r.turns, 2)[0])}\n```" for r in rollouts]

    rewards = events.Histograms("histogram/turn_reward")
    assert [event.step for event in rewards] == [1, 5]
    for event, rollout in zip(rewards, rollouts, strict=True):
        expected = [t.reward for t in rollout.turns]
        assert event.histogram_value.num == len(expected) == 16
        assert event.histogram_value.sum == pytest.approx(sum(expected))
    replies = events.Histograms("histogram/reply_tokens")[0].histogram_value
    assert replies.sum == int(rollouts[0].action_mask.sum())
    ended = [t.index + 1 for t in rollouts[0].turns if t.done]
    assert events.Histograms("histogram/episode_turns")[0].histogram_value.sum == sum(ended)

    image = events.Images("episode/0")[0]
    frames = [t.image for t in pick_episodes(rollouts[0].turns, 2)[0]]
    assert (image.height, image.width) == (64, len(frames) * 66)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"RolloutReport.*0.*1.*3.*0"):
        RolloutReport(every=0)
