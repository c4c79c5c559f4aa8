"""Errors of an environment: overcome where its episode can be repeated, told with the place where they cannot."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from PIL import Image

from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.types import StopReason
from tests.rollout.scripted import Scripted, Workplace, story, workplace


class Fragile(Scripted):
    """Fails where the shared list of failures says so, each of them once: ("reset", episode) or ("step", count)."""

    def __init__(self, failures: list[tuple[str, int]], length: int = 4) -> None:
        super().__init__(length, on_step=lambda count: self.fail("step", count))
        self.failures = failures
        self.closed = False

    def fail(self, where: str, number: int) -> None:
        if (where, number) in self.failures:
            self.failures.remove((where, number))
            raise TimeoutError("the game server is gone") if where == "step" else ConnectionError("no server")

    def reset(self, **kwargs):
        self.fail("reset", len(self.seeds))
        return super().reset(**kwargs)

    def close(self) -> None:
        self.closed = True
        raise OSError("was gone already")


def fragile_session(place: Workplace, failures: list[tuple[str, int]], retries: int) -> Session:
    return replaced(place, lambda: Fragile(failures), retries)


def replaced(place: Workplace, make: Callable[[], gymnasium.Env], retries: int) -> Session:
    """The first session with another environment."""
    old = place.sessions[0]
    return Session(0, place.worker(make, retries), old.episode_seed, place.renderer, old.memory)


def test_an_error_is_overcome_by_playing_the_episode_again(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        expected = story(place.collect(9))
    with workplace(tiny_folder, [Scripted(4)]) as place:
        failures, made = [("reset", 0), ("step", 3), ("step", 3), ("step", 2)], []

        def make() -> Fragile:
            made.append(Fragile(failures))
            return made[-1]

        place.sessions = [replaced(place, make, retries=2)]
        message = r"(?s)environment 0, episode 0 with seed \d+, in turn 2, action '.*trying again"
        with pytest.warns(UserWarning, match=message):
            rollout = place.collect(9)
        assert [env.closed for env in made] == [True] * 4 + [False]
    assert story(rollout) == expected
    # the first reset fails once, then step 2 once, then step 3 twice, each of them in the first episode
    errors = [turn.env_errors for turn in rollout.turns]
    assert errors[:4] == [("ConnectionError",), ("TimeoutError",), ("TimeoutError", "TimeoutError"), ()]
    assert not any(errors[4:])


def test_lone_surrogates_are_replaced_and_counted(tiny_folder):
    class Broken(Scripted):
        system_prompt = "half \ud83d"

        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return f"{observation} \udc00", info

        def step(self, action):
            observation, *rest, info = super().step(action)
            return observation, *rest, {**info, "long_term_text": "\ud83d\ude00 whole", "executed_action": "a\udfff"}

    with workplace(tiny_folder, [Scripted(3)]) as place:
        place.sessions = [replaced(place, Broken, retries=0)]
        turns = place.collect(3).turns
    assert turns[0].observation.endswith(" \ufffd")
    assert [turn.observation for turn in turns[1:]] == ["\U0001f600 whole"] * 2  # a pair is no lone one
    assert {turn.action for turn in turns} == {"a\ufffd"}
    assert [turn.env_errors for turn in turns] == [("surrogates", "surrogates"), ("surrogates",), ("surrogates",)]


def test_lone_surrogates_in_tools_and_in_names_of_numbers_are_replaced():
    class Calling(Scripted):
        @property
        def tool_schemas(self):
            described = {"type": "string", "enum": ["\ud83d\ude00", "half \ud83d"]}
            return ({"name": "search", "parameters": {"what\udfff": described}}, {"name": "stop"})

        def step(self, action):
            *answer, info = super().step(action)
            return *answer, {**info, "metrics": {"coins \udc00": 2}}

    env = Environment(Calling)
    described = {"type": "string", "enum": ["\U0001f600", "half \ufffd"]}
    assert env.reset(1).contract.tool_schemas == (
        {"name": "search", "parameters": {"what\ufffd": described}},
        {"name": "stop"},
    )
    assert env.step("one").metrics == {"coins \ufffd": 2.0}


@pytest.mark.parametrize("retries", [0, 2])
def test_an_error_that_stays_is_raised_with_its_place(retries, tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        session = fragile_session(place, [("step", 2)] * (retries + 1), retries)

        async def play() -> None:
            await session.start()
            await session.step("one")
            await session.step("two")

        with pytest.raises(EnvError, match="TimeoutError: the game server is gone") as caught:
            place.loop.run(play())
        assert caught.value.kind == "TimeoutError"
        assert "the game server is gone" in caught.value.trace
        seed = session.episode_seed(0)
        assert f"environment 0, episode 0 with seed {seed}, in turn 1, action 'two'" in caught.value.__notes__[0]


class Reporting(Scripted):
    """Reports numbers of its own, and renders."""

    render_mode = "rgb_array"

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {"progression": self.count / 4, "metrics": {"achievement/wood": self.count > 1}}
        return observation, reward, terminated, truncated, info

    def render(self):
        return np.full((2, 3, 3), self.count, dtype=np.uint8)


def test_metrics_and_images_of_an_environment_are_kept_with_its_turns(tiny_folder):
    with workplace(tiny_folder, [Reporting(3)]) as place:
        turns = place.collect(3).turns
    assert [turn.metrics for turn in turns] == [
        {"progression": 0.25, "achievement/wood": 0.0},
        {"progression": 0.5, "achievement/wood": 1.0},
        {"progression": 0.75, "achievement/wood": 1.0},
    ]
    shown = [np.asarray(Image.open(io.BytesIO(turn.image))) for turn in turns]
    assert [image.shape for image in shown] == [(2, 3, 3)] * 3
    assert [int(image.max()) for image in shown] == [0, 1, 2]  # what was there when the turn was played


def test_babyai_draws_itself():
    env = gymnasium.make("agentrl_envs:BabyAIText-GoToObjS4-v0", render_mode="rgb_array")
    env.reset(seed=1)
    image = env.render()
    assert image.shape == (64, 64, 3)
    assert image.std() > 0


def test_an_environment_that_comes_back_otherwise_loses_the_episode(tiny_folder):
    """Not even a further retry may take over a state that the policy was not shown."""

    class Other(Fragile):
        made = 0

        def __init__(self, failures):
            super().__init__(failures)
            Other.made += 1
            self.level = Other.made

        def _text(self):
            return f"level {self.level} step {self.count}"

    failures = [("step", 2)]
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions = [replaced(place, lambda: Other(failures), retries=5)]
        with pytest.warns(UserWarning, match="does not repeat its episode"):
            rollout = place.collect(5)
    assert [(turn.episode, turn.stop, turn.lost) for turn in rollout.turns[:2]] == [
        (0, StopReason.ENV_FAULT, ("replay",)),
        (1, None, ()),
    ]
    assert Other.made == 3  # it is not asked again


def test_a_picture_of_another_form_is_refused(tiny_folder):
    class Wrong(Reporting):
        def render(self):
            return np.zeros((2, 3), dtype=np.float32)

    with workplace(tiny_folder, [Wrong(3)]) as place, pytest.raises(EnvError, match=r"draws float32 \[2, 3\]"):
        place.collect(1)


class Wanderer(Scripted):
    def __init__(self, folder: str) -> None:
        super().__init__(4, on_step=lambda _: os.chdir(folder))


def test_an_environment_cannot_take_the_run_to_another_folder(tmp_path, monkeypatch):
    """Else checkpoints lie in another folder than the run. In a process of its own it can go where it likes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    shared, alone = (Environment(lambda: Wanderer(str(tmp_path / "elsewhere")), own) for own in (False, True))
    shared.reset(0)
    with pytest.raises(EnvError, match=r"working folder.*worker: process"):
        shared.step("go")
    assert Path.cwd() == tmp_path
    alone.reset(0)
    alone.step("go")
    assert Path.cwd() == tmp_path / "elsewhere"
