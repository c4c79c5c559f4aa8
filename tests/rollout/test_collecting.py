"""Collecting: how many turns, what is bootstrapped, who waits for whom, and which tokens are trained."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import gymnasium
import pytest

from lightning_agentrl.prompts.parser import ParsedReply
from lightning_agentrl.rollout import (
    FullMemory,
    PromptFormat,
    RawParser,
    TolerantParser,
    TurnInteraction,
    WindowMemory,
)
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.types import ModelInput, SegmentKind, StopReason, input_of
from tests.rollout.scripted import Scripted, story, workplace


def by_env(rollout, field):
    found: dict[int, list] = {}
    for turn in rollout.turns:
        found.setdefault(turn.env, []).append(getattr(turn, field))
    return found


@pytest.mark.parametrize("memory", [WindowMemory(), FullMemory()])
def test_environments_live_on(tiny_folder, memory):
    envs = [Scripted(5), Scripted(2), Scripted(50)]
    with workplace(tiny_folder, envs, memory=memory) as place:
        one, two, three = (place.collect(3) for _ in range(3))
    assert [len(rollout.turns) for rollout in (one, two, three)] == [9, 9, 9]
    assert by_env(one, "index") == {0: [0, 1, 2], 1: [0, 1, 0], 2: [0, 1, 2]}
    assert by_env(two, "index") == {0: [3, 4, 0], 1: [1, 0, 1], 2: [3, 4, 5]}
    assert by_env(three, "index") == {0: [1, 2, 3], 1: [0, 1, 0], 2: [6, 7, 8]}
    assert by_env(two, "episode") == {0: [0, 0, 1], 1: [1, 2, 2], 2: [0, 0, 0]}
    assert by_env(two, "episode_return") == {0: [10, 15, 1], 1: [3, 1, 3], 2: [10, 15, 21]}
    assert by_env(two, "reward") == {0: [4, 5, 1], 1: [2, 1, 2], 2: [4, 5, 6]}
    assert [len(env.steps) for env in envs] == [9, 9, 9]
    assert len(set(envs[1].seeds)) == len(envs[1].seeds) == 5  # its fifth episode has just begun
    assert len(one.episode.unique()) == 4


@pytest.mark.parametrize("memory", [WindowMemory(2), FullMemory()])
def test_bootstrap_of_a_cut_is_the_next_prompt(tiny_folder, memory):
    with workplace(tiny_folder, [Scripted(40), Scripted(40)], memory=memory) as place:
        one = place.collect(3)
        seen = len(place.engine.log)
        two = place.collect(1)
        prompts = {request.prompt for request, _ in place.engine.log[seen:]}
    cut = [turn for turn in one.turns if turn.index == 2]
    assert {input_of(turn.bootstrap) for turn in cut} == prompts
    assert len(prompts) == 2
    assert [turn.bootstrap for turn in one.turns if turn.index < 2] == [None] * 4
    assert all(segment.kind is SegmentKind.PROMPT for turn in cut for segment in turn.bootstrap)
    assert [len(two.samples), len(two.turns)] == [2, 2]


@pytest.mark.parametrize("memory", [WindowMemory(), FullMemory()])
@pytest.mark.parametrize("turns", [2, 5])  # the episode ends at the last turn of the rollout, and inside
@pytest.mark.parametrize(
    ("end", "stop"),
    [("terminated", StopReason.ENV_DONE), ("both", StopReason.ENV_DONE), ("truncated", StopReason.ENV_TRUNCATED)],
)
def test_terminated_has_no_next_state_and_truncated_has_the_true_one(tiny_folder, memory, turns, end, stop):
    with workplace(tiny_folder, [Scripted(2, end)], memory=memory) as place:
        rollout = place.collect(turns)
        last = rollout.turns[1]
        truncated = end == "truncated"
        assert (last.terminated, last.truncated, last.stop) == (not truncated, truncated, stop)
        if truncated:
            assert "step 2" in place.text(input_of(last.bootstrap).ids)
        else:
            assert last.bootstrap is None
        assert rollout.turns[0].bootstrap is None
        assert [sample.turns[-1].terminated for sample in rollout.samples] == rollout.terminated.tolist()
        if turns == 5:
            assert rollout.turns[2].index == 0
            assert rollout.turns[4].bootstrap is not None
            assert "step 1" in place.text(input_of(rollout.turns[4].bootstrap).ids)


def test_nobody_waits_for_a_slow_environment_where_requests_join_as_they_come(tiny_folder):
    """The slow one finishes its first step only after the fast one has played all its turns."""
    order: list[tuple[str, int]] = []
    fast_is_done = threading.Event()

    def slow(count: int) -> None:
        assert fast_is_done.wait(timeout=30), "the fast environment was held up by the slow one"
        order.append(("slow", count))

    def fast(count: int) -> None:
        order.append(("fast", count))
        if count == 6:
            fast_is_done.set()

    envs = [Scripted(50, on_step=slow), Scripted(50, on_step=fast)]
    with workplace(tiny_folder, envs, admission="as_they_come") as place:
        rollout = place.collect(6)
    assert order == [("fast", n) for n in range(1, 7)] + [("slow", n) for n in range(1, 7)]
    assert by_env(rollout, "index") == {0: list(range(6)), 1: list(range(6))}


def test_windowed_samples_are_what_the_engine_saw_and_sampled(tiny_folder):
    with workplace(tiny_folder, [Scripted(3), Scripted(4)]) as place:
        rollout = place.collect(5)
        log = {request.prompt: reply for request, reply in place.engine.log}
        assert len(log) == len(rollout) == 10
        for sample in rollout.samples:
            prompt, action = sample.segments
            assert action.ids == log[prompt.input].ids
            assert action.logps == log[prompt.input].logps
            assert sample.turns[0].reply == place.renderer.decode(action.ids)
            assert sample.turns[0].hit_token_cap == (not log[prompt.input].closed)


def test_growing_samples_are_what_the_engine_saw_and_sampled(tiny_folder):
    with workplace(tiny_folder, [Scripted(4), Scripted(30)], memory=FullMemory()) as place:
        one = place.collect(3)
        two = place.collect(3)
        log = {request.prompt: reply for request, reply in place.engine.log}
    assert len(log) == 12
    assert [len(sample.turns) for sample in one.samples] == [3, 3]
    assert [len(sample.turns) for sample in two.samples] == [1, 2, 3]  # the first episode ends after four turns
    for sample in (*one.samples, *two.samples):
        assert sample.segments[0].kind is SegmentKind.PROMPT
        before = ModelInput()
        for segment in sample.segments:
            if segment.is_action:
                reply = log[before]  # the engine read exactly the tokens before
                assert (segment.ids, segment.logps) == (reply.ids, reply.logps)
            before += segment.input
    # What the first rollout trained is context in the second one.
    for old, new in ((one.samples[0], two.samples[0]), (one.samples[1], two.samples[2])):
        assert new.segments[0].ids[: len(old.ids)] == old.ids
        assert min(new.action_positions) > max(old.action_positions)
    assert [turn.index for turn in two.samples[2].turns] == [3, 4, 5]


@pytest.mark.parametrize(
    ("mode", "rewards", "indices", "stops"),
    [
        ("add", [1, 1.75, 3, 3.75, 5], [0, 1, 2, 3, 4], [None] * 5),
        ("replace", [1, -0.25, 3, -0.25, 5], [0, 1, 2, 3, 4], [None] * 5),
        ("truncate", [1, 1.75, 1, 1.75, 1], [0, 1, 0, 1, 0], [None, "invalid_action", None, "invalid_action", None]),
    ],
)
def test_invalid_replies(tiny_folder, mode, rewards, indices, stops):
    loop = TurnInteraction(4, RawParser(), invalid_penalty=0.25, invalid_mode=mode)
    with workplace(tiny_folder, [Scripted(50, invalid=(2, 4))], interaction=loop) as place:
        turns = place.collect(5).turns
    assert [turn.valid for turn in turns] == [True, False, True, False, True]
    assert [turn.reward for turn in turns] == rewards
    assert [turn.index for turn in turns] == indices
    assert [turn.stop for turn in turns] == stops
    assert [turn.bootstrap is not None for turn in turns[:-1]] == [stop is not None for stop in stops[:-1]]
    assert [turn.env_reward for turn in turns] == [index + 1 for index in indices]  # the penalty is no env reward
    assert turns[1].episode_return == 3


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_penalty_comes_on_top_of_an_end(tiny_folder, end):
    loop = TurnInteraction(4, RawParser(), invalid_penalty=0.25, invalid_mode="truncate")
    with workplace(tiny_folder, [Scripted(2, end, invalid=(2,))], interaction=loop) as place:
        last = place.collect(2).turns[1]
    assert last.stop == {"terminated": "env_done", "truncated": "env_truncated"}[end]
    assert last.reward == 1.75


class Named(Scripted):
    """Takes one of two actions. A random model names neither."""

    actions = {"turn left": "turn", "go forward": "walk"}
    aliases = {"walk": "go forward"}
    default_action = "go forward"
    system_prompt = "Walk."


def test_a_reply_without_action_runs_the_default(tiny_folder):
    env = Named(50)
    loop = TurnInteraction(4, TolerantParser())
    with workplace(tiny_folder, [env], interaction=loop) as place:
        turns = place.collect(4).turns
    assert env.steps == ["go forward"] * 4
    assert [(turn.valid, turn.parsed_action, turn.action, turn.reward) for turn in turns] == [
        (False, None, "go forward", n - 0.1) for n in (1, 2, 3, 4)
    ]


class Offering(gymnasium.Wrapper):
    """Gives an environment names for its actions from outside."""

    actions = {"north": "go up"}
    default_action = "north"


def test_an_action_without_a_letter_is_taken_and_told_as_it_is(tiny_folder):
    """The empty text may be the name of an action, such as to wait."""
    env = Scripted(9)
    env.actions, env.default_action = {"": "wait", "left": "one step left"}, "left"

    class Waits(RawParser):
        def parse(self, *_):
            return ParsedReply("", "")

    with workplace(tiny_folder, [env], interaction=TurnInteraction(4, Waits())) as place:
        turns = place.collect(2).turns
    assert env.steps == [turn.action for turn in turns] == [turn.parsed_action for turn in turns] == ["", ""]


def test_a_wrapper_may_name_the_actions(tiny_folder):
    with workplace(tiny_folder, [Offering(Scripted(9))], interaction=TurnInteraction(4)) as place:
        rollout = place.collect(2)
        assert {turn.action for turn in rollout.turns} == {"north"}
        assert "north: go up" in place.text(rollout.samples[0].ids)


def test_own_limit_of_turns_is_a_truncation(tiny_folder):
    loop = TurnInteraction(4, RawParser(), max_turns=2)
    with workplace(tiny_folder, [Scripted(3), Scripted(2)], interaction=loop) as place:
        rollout = place.collect(4)
        turns = [turn for turn in rollout.turns if turn.env == 0]
        assert by_env(rollout, "stop") == {0: [None, "max_turns"] * 2, 1: [None, "env_done"] * 2}
        assert [turn.truncated for turn in turns] == [False, True, False, True]
        assert "step 2" in place.text(input_of(turns[1].bootstrap).ids)
        assert [turn.episode for turn in turns] == [0, 0, 1, 1]


def test_a_full_context_truncates(tiny_folder):
    limit = 200
    settings = {"memory": FullMemory(), "prompt": PromptFormat(think=False, max_prompt_tokens=limit)}
    with workplace(tiny_folder, [Scripted(50)], **settings) as place:
        rollout = place.collect(30)
        lengths = [len(request.prompt) for request, _ in place.engine.log]
    assert max(lengths) <= limit
    full = [turn for turn in rollout.turns if turn.done]
    assert len(full) >= 2
    assert {turn.stop for turn in full} == {StopReason.CONTEXT_LENGTH}
    for turn in full:
        assert turn.truncated
        assert len(input_of(turn.bootstrap)) > limit
    places = [turn.index for turn in rollout.turns]
    assert [b for a, b in zip(rollout.turns, places[1:], strict=False) if a.done] == [0] * len(
        [turn for turn in rollout.turns[:-1] if turn.done]
    )


class Plain(gymnasium.Env):
    """As little as gymnasium asks for, with a limit of steps from outside."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"say {self.np_random.integers(10)}", {}

    def step(self, action):
        return f"you said {len(action)} letters", 1, False, False, {}


def test_any_text_environment_works(tiny_folder):
    env = gymnasium.wrappers.TimeLimit(Plain(), 2)
    with workplace(tiny_folder, [env]) as place:
        rollout = place.collect(4)
        log = [place.renderer.decode(reply.ids).strip() for _, reply in place.engine.log]
    assert [turn.action for turn in rollout.turns] == log
    assert [turn.success for turn in rollout.turns] == [None] * 4
    assert [turn.stop for turn in rollout.turns] == [None, "env_truncated"] * 2
    assert [turn.valid for turn in rollout.turns] == [bool(text) for text in log]
    assert rollout.turns[1].observation == f"you said {len(log[0])} letters"


def test_same_seed_same_rollout_whoever_else_plays(tiny_folder):
    def play(count: int, seed: int) -> list[tuple]:
        with workplace(tiny_folder, [Scripted(4) for _ in range(count)], seed=seed) as place:
            return story(place.collect(3)) + story(place.collect(3))

    three = play(3, seed=5)
    assert play(3, seed=5) == three
    assert play(1, seed=5) == [turn for turn in three if turn[0] == 0]
    assert play(3, seed=6) != three


def test_every_reply_has_its_own_seed(tiny_folder):
    with workplace(tiny_folder, [Scripted(2) for _ in range(3)]) as place:
        place.collect(3)
        place.collect(3)
        assert len({request.seed for request, _ in place.engine.log}) == len(place.engine.log) == 18


def test_turns_say_what_happened(tiny_folder):
    with workplace(tiny_folder, [Scripted(50, on_step=lambda _: time.sleep(0.02))]) as place:
        place.engine.sync(17)
        started = time.perf_counter()
        turns = place.collect(2).turns
        seconds = time.perf_counter() - started
    assert [turn.policy_version for turn in turns] == [17, 17]
    assert all(turn.env_seconds >= 0.02 for turn in turns)
    assert all(turn.engine_seconds > 0 for turn in turns)
    assert sum(turn.env_seconds + turn.engine_seconds for turn in turns) <= seconds
    assert [turn.observation[-6:] for turn in turns] == ["step 0", "step 1"]


def test_history_cuts_are_counted(tiny_folder):
    class Wordy(Scripted):
        def _text(self) -> str:
            return super()._text() + " wall" * 20

    settings = {"memory": WindowMemory(6), "prompt": PromptFormat(think=False, max_prompt_tokens=400)}
    with workplace(tiny_folder, [Wordy(50)], **settings) as place:
        rollout = place.collect(8)
        lengths = [len(request.prompt) for request, _ in place.engine.log]
    assert max(lengths) <= 400
    cuts = [turn.history_cuts for turn in rollout.turns]
    assert cuts[0] == 0
    assert cuts[-1] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_reply_tokens": 0}, "max_reply_tokens must be at least 1, got 0"),
        ({"invalid_mode": "ignore"}, "invalid_mode must be add, replace or truncate, got 'ignore'"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
    ],
)
def test_interaction_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TurnInteraction(**arguments)


def test_an_interrupt_waits_until_the_coroutine_has_ended():
    loop, steps = LoopThread(), []

    async def work() -> None:
        try:
            steps.append("begun")
            threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.2)
            steps.append("cleaned up")

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert steps == ["begun", "cleaned up"]
        assert loop.run(asyncio.sleep(0, "still running")) == "still running"
    finally:
        loop.stop()
        loop.stop()  # harmless


def test_the_loop_works_inside_another_loop():
    loop = LoopThread()

    async def notebook() -> int:
        return loop.run(asyncio.sleep(0, 3))

    try:
        assert asyncio.run(notebook()) == 3
    finally:
        loop.stop()
