"""Summaries: turns without a step of the environment, which stand for the past in later prompts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_agentrl.episodes.episode import SUMMARY
from lightning_agentrl.rollout import FullMemory, Memory, RawParser, SummaryInteraction, WindowMemory
from lightning_agentrl.types import StopReason, Turn
from tests.rollout.scripted import Scripted, workplace

QUESTION = "What was it?"


def summarized(every: int = 2, **options: Any) -> SummaryInteraction:
    return SummaryInteraction(every, QUESTION, max_reply_tokens=4, parser=RawParser(), **options)


def is_summary(turn: Turn) -> bool:
    return turn.observation == QUESTION


@pytest.mark.parametrize("memory", [WindowMemory(3), FullMemory()])
def test_a_summary_is_asked_for_after_some_steps_and_takes_none(tiny_folder: str, memory: Memory) -> None:
    env = Scripted(length=5)
    with workplace(tiny_folder, [env], interaction=summarized(), memory=memory) as place:
        turns = place.episode(place.sessions[0])
    assert [is_summary(turn) for turn in turns] == [False, False, True, False, False, True, False]
    assert [turn.index for turn in turns] == list(range(7))
    assert [turn.reward for turn in turns] == [1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 5.0]
    assert len(env.steps) == 5
    assert turns[-1].stop is StopReason.ENV_DONE
    assert turns[2].state != turns[5].state


def test_later_prompts_show_the_summary_in_place_of_the_past(tiny_folder: str) -> None:
    with workplace(tiny_folder, [Scripted(length=5)], interaction=summarized(), memory=WindowMemory(3)) as place:
        turns = place.episode(place.sessions[0])
        prompts = [place.text(request.prompt.ids) for request, _ in place.engine.log]
    assert SUMMARY not in "".join(prompts[:3])
    assert "step 1" in prompts[2]
    assert QUESTION in prompts[2]
    for prompt in prompts[3:]:
        assert SUMMARY in prompt
    assert turns[2].reply.strip() in prompts[3]
    assert "step 0" not in prompts[3]
    assert "step 1" not in prompts[3]
    assert "step 2" in prompts[4]
    assert QUESTION not in prompts[4]


def test_a_growing_row_ends_with_the_summary_and_another_begins(tiny_folder: str) -> None:
    with workplace(tiny_folder, [Scripted(length=5)], interaction=summarized(), memory=FullMemory()) as place:
        samples, _ = place.loop.run(place.player.play_episode(place.sessions[0]))
        read = [(*request.prompt.ids, *reply.ids) for request, reply in place.engine.log]
    assert [len(sample.turns) for sample in samples] == [3, 3, 1]
    assert [sample.ids for sample in samples] == [read[2], read[5], read[6]]


def test_a_rollout_cut_at_a_summary_has_the_next_prompt_to_bootstrap_from(tiny_folder: str) -> None:
    with workplace(tiny_folder, [Scripted(length=9)], interaction=summarized()) as place:
        turns = place.collect(3).turns
        assert is_summary(turns[-1])
        assert turns[-1].bootstrap == place.sessions[0].last_state()
        assert SUMMARY in place.text(turns[-1].bootstrap[0].ids)
        assert [is_summary(turn) for turn in place.collect(3).turns] == [False, False, True]


def test_an_episode_goes_on_from_a_checkpoint_with_its_summary(tiny_folder: str) -> None:
    def played(first: int) -> list[tuple[Any, ...]]:
        with workplace(tiny_folder, [Scripted(length=9)], interaction=summarized(), memory=FullMemory()) as place:
            told = [place.collect(first)]
            saved = place.sessions[0].state_dict()
        with workplace(tiny_folder, [Scripted(length=9)], interaction=summarized(), memory=FullMemory()) as place:
            place.sessions[0].load_state_dict(saved)
            told.append(place.collect(8 - first))
        return [(t.index, t.observation, t.reply) for rollout in told for t in rollout.turns]

    assert played(3) == played(5) == played(7)


def test_no_summary_is_asked_for_without_room_for_the_question(tiny_folder: str) -> None:
    interaction = SummaryInteraction(1, QUESTION * 400, max_reply_tokens=4, parser=RawParser())
    with workplace(tiny_folder, [Scripted(length=3)], interaction=interaction) as place:
        assert len(place.episode(place.sessions[0])) == 3
