"""A session goes on where it was: environments are replayed from seed and actions."""

from __future__ import annotations

import itertools
import random
import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from lightning_agentrl.engines import PolicyHandle, Reply, TransformersEngine
from lightning_agentrl.episodes.episode import Episode, Prompt, make_prompt
from lightning_agentrl.episodes.judge import Judge, JudgedTurn
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply
from lightning_agentrl.rollout import (
    EnvConfig,
    FullMemory,
    NotebookMemory,
    PromptFormat,
    RawParser,
    TurnInteraction,
    WindowMemory,
)
from lightning_agentrl.types import rollout_to_plain
from tests.rollout.scripted import Scripted, story, workplace

GUESS = EnvConfig("agentrl_envs:GuessNumber-v0", {"highest": 50, "max_turns": 5})
BABYAI = EnvConfig("agentrl_envs:BabyAIText-GoToObjS4-v0")


@pytest.mark.parametrize("memory", [WindowMemory(3), FullMemory()])
@pytest.mark.parametrize(
    "make", [lambda: Scripted(6, "truncated"), *(pytest.param(e.make, marks=pytest.mark.slow) for e in (GUESS, BABYAI))]
)
def test_resumed_sessions_give_the_same_rollouts(tiny_folder, tmp_path, memory, make):
    settings = {"memory": memory, "interaction": TurnInteraction(4, RawParser())}
    settings["prompt"] = PromptFormat(think=False, examples=False, max_prompt_tokens=1500)
    with workplace(tiny_folder, [make() for _ in range(2)], **settings) as place:
        place.collect(3)
        torch.save([session.state_dict() for session in place.sessions], tmp_path / "sessions.pt")
        expected = story(place.collect(7))
    with workplace(tiny_folder, [make() for _ in range(2)], **settings) as place:
        for session, state in zip(place.sessions, torch.load(tmp_path / "sessions.pt", weights_only=True), strict=True):
            session.load_state_dict(state)
            assert session.state_dict() == state
        assert story(place.collect(7)) == expected


class Opening(Scripted):
    """Opens one more door with each step, and says so in its rules."""

    default_action = "door 0"

    @property
    def actions(self) -> dict[str, str]:
        return {f"door {number}": "" for number in range(getattr(self, "count", 0) + 1)}

    @property
    def system_prompt(self) -> str:
        return f"There are {len(self.actions)} doors."


@pytest.mark.parametrize("memory", [WindowMemory(0), WindowMemory(2)])
def test_a_prompt_says_what_the_environment_offers_in_its_turn(tiny_folder, memory):
    settings = {"memory": memory, "prompt": PromptFormat(think=False, max_prompt_tokens=1500)}
    tokenizer = load_tokenizer(str(tiny_folder))
    with workplace(tiny_folder, [Opening(9)], interaction=TurnInteraction(4), **settings) as place:
        prompts = [tokenizer.decode(sample.segments[0].ids) for sample in place.collect(4).samples]
    for doors, prompt in enumerate(prompts, 1):
        assert f"There are {doors} doors." in prompt
        assert f"door {doors - 1}" in prompt
        assert f"door {doors}" not in prompt


class Numpys(Scripted):
    """Gives texts and numbers of numpy's own types, as its generators draw them; in messages or as they are."""

    actions = {np.str_("left"): np.str_("one step left")}
    default_action = np.str_("left")

    def __init__(self, role: str) -> None:
        super().__init__(9)
        self.observation_role, self.role = np.str_("user"), np.str_(role)

    def _text(self) -> Any:
        text = np.str_(super()._text())
        return {"messages": [{"role": self.role, "content": text}]} if self.role else text

    def step(self, action: str) -> Any:
        text, reward, *ends, info = super().step(action)
        flags = {
            "executed_action": np.str_("left"),
            "success": np.bool_(False),
            "metrics": {np.str_("x"): np.float32(1)},
        }
        return text, np.float32(reward), *map(np.bool_, ends), info | flags


@pytest.mark.parametrize("role", ["", "user"])
@pytest.mark.parametrize("memory", [WindowMemory(3), FullMemory()])
def test_what_an_environment_gives_in_types_of_numpy_can_be_saved(tiny_folder, tmp_path, memory, role):
    with workplace(tiny_folder, [Numpys(role)], memory=memory, interaction=TurnInteraction(4)) as place:
        rollout = place.collect(2)
        saved = [place.sessions[0].state_dict(), rollout_to_plain(rollout)]
        torch.save(saved, tmp_path / "saved.pt")
        assert place.sessions[0].state_dict() == torch.load(tmp_path / "saved.pt", weights_only=True)[0]
    assert {type(text) for turn in rollout.turns for text in (turn.observation, turn.action)} == {str}


def test_notes_of_an_episode_are_in_its_prompts_after_a_resume_too(tiny_folder, tmp_path):
    class Writes(TransformersEngine):
        async def generate(self, request):
            ids = tuple(load_tokenizer(str(tiny_folder)).encode(f"go\nnote: fact {request.number[1]}"))
            texts.append((request.number, place.text(request.prompt.ids)))
            return Reply(ids, (-1.0,) * len(ids), closed=True, policy_version=0)

    def start(place):
        place.engine.stop()
        place.engine = Writes()
        place.engine.start(PolicyHandle(place.policy, place.renderer.stop_token_ids, nullcontext))

    settings = {"memory": NotebookMemory(notes=3, turns=0), "interaction": TurnInteraction(16, RawParser())}
    texts: list = []
    with workplace(tiny_folder, [Scripted(6) for _ in range(2)], **settings) as place:
        start(place)
        place.collect(4)
        torch.save([session.state_dict() for session in place.sessions], tmp_path / "sessions.pt")
        texts.clear()
        expected = story(place.collect(4)), sorted(texts)
    texts.clear()
    with workplace(tiny_folder, [Scripted(6) for _ in range(2)], **settings) as place:
        start(place)
        for session, state in zip(place.sessions, torch.load(tmp_path / "sessions.pt", weights_only=True), strict=True):
            session.load_state_dict(state)
        assert (story(place.collect(4)), sorted(texts)) == expected
    notes = {number: re.findall(r"^- (.*)", text, re.M) for number, text in texts}
    assert notes[0, 4] == ["fact 1", "fact 2", "fact 3"]
    assert notes[0, 5] == ["fact 2", "fact 3", "fact 4"]
    assert notes[0, 6] == ["none yet"], "the next episode begins without notes"


@pytest.mark.parametrize("memory", [WindowMemory(2), FullMemory()])
def test_a_prompt_is_made_once_for_each_observation(tiny_folder, monkeypatch, memory):
    made: list[int] = []

    def counting(episode: Episode, *args: Any) -> Prompt:
        made.append(episode.turn)
        return make_prompt(episode, *args)

    monkeypatch.setattr("lightning_agentrl.episodes.session.make_prompt", counting)
    with workplace(tiny_folder, [Scripted(4)], memory=memory) as place:
        place.collect(6)
        past = place.sessions[0].episode.past
    assert made == [0, 1, 2, 3, 0, 1, 2]  # no prompt follows the end of an episode; the last one is the bootstrap state
    assert [turn.follows for turn in past] == [-1, 0]


def test_a_moment_stays_as_its_episode_goes_on(tiny_folder):
    with workplace(tiny_folder, [Scripted(9)], memory=FullMemory()) as place:
        place.collect(2)
        session = place.sessions[0]
        moment, before = session.moment(), session.state_dict()
        place.collect(3)
        other = place.session(0, Scripted(9))
        place.loop.run(other.enter(moment, seed=1))
        assert other.state_dict() == before
        assert session.episode.turn == 5


def test_a_session_before_its_first_episode(tiny_folder):
    env = Scripted(3)
    with workplace(tiny_folder, [Scripted(3), env]) as place:
        fresh, other = place.sessions
        other.load_state_dict(fresh.state_dict())
        assert env.seeds == []
        assert [turn.episode for turn in place.collect(1).turns] == [0, 0]


def test_an_environment_with_randomness_of_its_own_is_refused(tiny_folder):
    counter = itertools.count()

    class Unrepeatable(Scripted):
        def _text(self) -> str:
            return f"ticket {next(counter)}"

    with workplace(tiny_folder, [Unrepeatable(9), Unrepeatable(9)]) as place:
        place.collect(2)
        state = place.sessions[1].state_dict()
        with pytest.raises(RuntimeError, match=r"5.*self.np_random"):
            place.session(5, Unrepeatable(9)).load_state_dict(state)


class Bruised(Scripted):
    """It tells its health, from a dice of its own where it has one, as text that matters only now."""

    def __init__(self, dice: random.Random | None = None) -> None:
        super().__init__(9)
        self.dice = dice

    def reset(self, **settings: Any) -> tuple[str, dict[str, Any]]:
        super().reset(**settings)
        self.health = 9 if self.dice is None else self.dice.randrange(2**32)
        return self.shown()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, *ends, _ = super().step(action)
        self.health -= 1
        text, info = self.shown()
        return text, *ends, info

    def shown(self) -> tuple[str, dict[str, Any]]:
        long, short = self._text(), f"health {self.health}"
        return f"{short}\n{long}", {"long_term_text": long, "short_term_text": short}


def test_an_episode_is_resumed_only_where_text_that_matters_only_now_is_the_same(tiny_folder):
    with workplace(tiny_folder, [Bruised(random.Random(0)), Bruised()]) as place:
        place.collect(2)
        unrepeatable, repeatable = (session.state_dict() for session in place.sessions)
        with pytest.raises(RuntimeError, match=r"5.*self.np_random"):
            place.session(5, Bruised(random.Random(1))).load_state_dict(unrepeatable)
        place.session(1, Bruised()).load_state_dict(repeatable)


def test_a_turn_holds_and_a_judge_is_told_what_the_history_does_not_show(tiny_folder):
    seen: list[str] = []

    class Listening(Judge):
        async def judge(self, turn: JudgedTurn) -> float:
            seen.append(turn.observation)
            return 0.0

    with workplace(tiny_folder, [Bruised()]) as place:
        place.sessions[0].judge = Listening()
        turns = place.collect(3).turns
        past = place.sessions[0].episode.past
    assert [turn.observation for turn in turns] == seen
    assert [text.splitlines()[0] for text in seen] == ["health 9", "health 8", "health 7"]
    assert [turn.state for turn in turns] == [(text,) for text in seen]
    assert [turn.observation for turn in past] == [text.splitlines()[1] for text in seen]


def test_replay_gives_actions_and_seed_of_the_running_episode_only(tiny_folder):
    env = Scripted(4)
    with workplace(tiny_folder, [Scripted(4)]) as place:
        rollout = place.collect(6)
        session = place.session(0, env)
        session.load_state_dict(place.sessions[0].state_dict())
        assert env.steps == [turn.action or "" for turn in rollout.turns[4:]]
        assert env.seeds == [place.sessions[0].episode_seed(1)]
        episode = session.episode
        assert (episode.number, episode.turns_taken, episode.env_return) == (1, 6, 3.0)


class Nearest(ActionParser):
    """Takes names out of an array, whose texts are numpy's.

    Args:
        thought: whether the thought stays such a text.
        action: whether the action does.
    """

    def __init__(self, thought: bool, action: bool) -> None:
        self.thought, self.action = thought, action

    def parse(self, reply: str, actions: Any, aliases: Any) -> ParsedReply:
        left, right = np.array(["left", "right"])
        return ParsedReply(left if self.thought else str(left), right if self.action else str(right))


@pytest.mark.parametrize(("thought", "action"), [(True, True), (True, False), (False, True)])
def test_an_episode_whose_parser_gives_texts_of_numpys_can_be_saved(tiny_folder, tmp_path, thought, action):
    interaction = TurnInteraction(max_reply_tokens=2, parser=Nearest(thought, action))
    with workplace(tiny_folder, [Scripted(9)], interaction=interaction) as place:
        turns = place.collect(2).turns
        torch.save(place.sessions[0].state_dict(), tmp_path / "saved")
    state = torch.load(tmp_path / "saved", weights_only=True)
    assert state["actions"] == [turn.action for turn in turns] == ["right", "right"]
    assert [turn["thought"] for turn in state["past"]] == ["left", "left"]
