"""What a recorder makes of turns of more than one episode at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lightning_agentrl.episodes.episode import Prompt
from lightning_agentrl.episodes.recorder import EpisodeRecorder, Recorder
from lightning_agentrl.types import StopReason, samples_from_plain, samples_to_plain
from lightning_agentrl.types.plain import PixelTable
from tests.types.samples import action, prompt, turn

PROMPT = Prompt((prompt(1),), (prompt(2),), history_cuts=0)


def test_a_turn_that_was_recorded_is_amended_and_no_other():
    recorder = EpisodeRecorder(group=5, grows=False)
    for episode, index in ((0, 0), (1, 0), (0, 1), (1, 1)):
        recorder.record(PROMPT, action(11), turn(episode=episode, index=index))
    recorder.amend(0, reward=-1.0, terminated=True, stop=StopReason.ENV_DONE)
    turns = [sample.turns[0] for sample in recorder.samples()]
    assert [(t.episode, t.index, t.reward, t.done) for t in turns] == [
        (0, 0, 0.0, False), (1, 0, 0.0, False), (0, 1, -1.0, True), (1, 1, 0.0, False),
    ]  # fmt: skip
    assert {t.group for t in turns} == {5}
    assert not recorder.ended  # that is for the last turn to say


def test_a_turn_of_an_earlier_rollout_cannot_be_amended():
    recorder = Recorder(2, grows=False)
    recorder.record(PROMPT, action(11), turn(episode=3))
    with pytest.raises(ValueError, match="has no turn of episode 2"):
        recorder.amend(2, reward=1.0)


def test_episodes_side_by_side_do_not_grow_into_one_sample():
    recorder = Recorder(3, grows=True)
    for episode in (0, 0, 1):
        recorder.record(PROMPT, action(11), turn(episode=episode, index=0))
    assert [len(sample.turns) for sample in recorder.samples()] == [2, 1]
    assert [sample.ids for sample in recorder.samples()] == [(1, 2, 11, 2, 11), (1, 2, 11)]


@pytest.mark.parametrize("recorder", [Recorder(2, grows=False), EpisodeRecorder(group=0, grows=True)])
def test_no_turn_is_recorded_beyond_those_that_are_wanted(recorder):
    for index, ends in enumerate(({}, {"terminated": True, "stop": StopReason.ENV_DONE})):
        recorder.record(PROMPT, action(11), turn(index=index, **ends))
    assert recorder.full
    with pytest.raises(ValueError, match=r"the recorder is full.*data\.init_args\.interaction"):
        recorder.record(PROMPT, action(11), turn(episode=1))
    assert recorder.recorded == 2


@pytest.mark.parametrize("grows", [False, True])
def test_nothing_is_recorded_of_an_episode_that_has_ended(grows):
    """Values and rewards behind an end would count as its own."""
    recorder = Recorder(4, grows)
    recorder.record(PROMPT, action(11), turn(terminated=True, stop=StopReason.ENV_DONE))
    recorder.record(PROMPT, action(11), turn(episode=1))
    for index in (0, 1):
        with pytest.raises(ValueError, match=r"of episode 0, but that episode has ended.*data\.init_args\.interaction"):
            recorder.record(PROMPT, action(11), turn(index=index))
    recorder.record(PROMPT, action(11), turn(episode=1, index=1, truncated=True, stop=StopReason.MAX_TURNS))
    with pytest.raises(ValueError, match="of episode 1, but that episode has ended"):
        recorder.record(PROMPT, action(11), turn(episode=1, index=2))
    assert [len(sample.turns) for sample in recorder.samples()] == ([1, 2] if grows else [1, 1, 1])


@pytest.mark.parametrize("grows", [False, True])
def test_what_is_recorded_is_in_types_that_a_checkpoint_can_hold(grows, tmp_path):
    """An interaction may have its numbers from numpy, where a mean of rewards is a ``np.float64``."""
    recorder = EpisodeRecorder(group=0, grows=grows)
    rewards = np.array([0.5, 1.5])
    recorder.record(
        PROMPT,
        action(11),
        turn(action=np.array(["left"])[0], reward=rewards.mean(), valid=rewards[0] < 1, metrics={"coins": np.int64(2)}),
    )
    recorder.amend(0, episode_return=np.float32(1.5))
    images: PixelTable = {}
    torch.save(samples_to_plain(recorder.samples(), images), tmp_path / "saved")
    (sample,) = samples_from_plain(torch.load(tmp_path / "saved", weights_only=True), images)
    told = sample.turns[0]
    assert (told.action, told.reward, told.valid, told.metrics) == ("left", 1.0, True, {"coins": 2})
    assert json.dumps(told.episode_return) == "1.5"


def test_faults_that_were_noted_in_a_turn_stay_there_when_a_later_one_ends_its_episode():
    """Two episodes side by side: the first turn of one tells of a start that failed, then both are cut."""
    recorder = Recorder(4, grows=False)
    recorder.record(PROMPT, action(11), turn(episode=0, lost=("start",)))
    recorder.record(PROMPT, action(11), turn(episode=1))
    assert recorder.truncate(StopReason.ENV_FAULT, lambda: (prompt(2),), ("step",))
    assert [sample.turns[0].lost for sample in recorder.samples()] == [("start",), ("step",)]
