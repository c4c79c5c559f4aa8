"""Errors of an environment: overcome where its episode can be repeated, told with the place where they cannot."""

from __future__ import annotations

import io

import gymnasium
import numpy as np
import pytest
from PIL import Image

from lightning_agentrl.episodes.session import ReplayDiffersError, Session
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.rollout import EnvConfig
from tests.rollout.scripted import Scripted, story, workplace


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


def fragile_session(place, failures: list[tuple[str, int]], retries: int) -> Session:
    old = place.sessions[0]
    parts = (old.episode_seed, old.renderer, old.memory, old.executor)
    return Session(0, Fragile(failures), *parts, remake=lambda: Fragile(failures), retries=retries)


def test_an_error_is_overcome_by_playing_the_episode_again(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        expected = story(place.collect(9))
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions = [fragile_session(place, [("reset", 0), ("step", 3), ("step", 3), ("step", 2)], retries=2)]
        first = place.sessions[0].env
        told = r"(?s)environment 0, episode 0 with seed \d+, in turn 2, action '.*trying again"
        with pytest.warns(UserWarning, match=told):
            rollout = place.collect(9)
        assert first.closed
        assert place.sessions[0].env is not first
    assert story(rollout) == expected
    # the first reset fails once, then step 2 once, then step 3 twice, each of them in the first episode
    errors = [turn.env_errors for turn in rollout.turns]
    assert errors[:4] == [("ConnectionError",), ("TimeoutError",), ("TimeoutError", "TimeoutError"), ()]
    assert not any(errors[4:])


def test_an_error_that_stays_is_raised_with_its_place(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions = [fragile_session(place, [("step", 2)] * 3, retries=2)]
        with pytest.warns(UserWarning, match="trying again"), pytest.raises(EnvError) as caught:
            place.collect(5)
        seed = place.sessions[0].episode_seed(0)
        assert f"environment 0, episode 0 with seed {seed}, in turn 1, action " in caught.value.__notes__[0]


def test_without_retries_the_first_error_is_raised(tiny_folder):
    with workplace(tiny_folder, [Scripted(4)]) as place:
        place.sessions = [fragile_session(place, [("step", 2)], retries=0)]
        with pytest.raises(EnvError):
            place.collect(5)


def test_retries_below_zero_are_refused():
    with pytest.raises(ValueError, match=r"data.init_args.env.retries must be at least 0, got -1"):
        EnvConfig("agentrl_envs:Bandit-v0", retries=-1)


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


def test_metrics_that_are_no_numbers_are_refused(tiny_folder):
    class Chatty(Scripted):
        def step(self, action):
            return *super().step(action)[:4], {"metrics": {"mood": "good"}}

    with workplace(tiny_folder, [Chatty(3)]) as place, pytest.raises(ValueError, match=r"info\['metrics'\] = .*mood"):
        place.collect(1)


@pytest.mark.parametrize("name", ["retries", "errors/mine"])
def test_names_of_our_own_numbers_are_refused(tiny_folder, name):
    class Greedy(Scripted):
        def step(self, action):
            return *super().step(action)[:4], {"metrics": {name: 1.0}}

    with workplace(tiny_folder, [Greedy(3)]) as place, pytest.raises(ValueError, match=name):
        place.collect(1)


def test_babyai_draws_itself():
    env = gymnasium.make("agentrl_envs:BabyAIText-GoToObjS4-v0", render_mode="rgb_array")
    env.reset(seed=1)
    image = env.render()
    assert image.shape == (64, 64, 3)
    assert image.std() > 0


def test_an_environment_that_comes_back_otherwise_is_refused(tiny_folder):
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
        old = place.sessions[0]
        parts = (old.episode_seed, old.renderer, old.memory, old.executor)
        place.sessions = [Session(0, Other(failures), *parts, remake=lambda: Other(failures), retries=5)]
        with pytest.warns(UserWarning, match="trying again"), pytest.raises(ReplayDiffersError) as caught:
            place.collect(5)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert Other.made == 2  # it is not asked again


def test_a_picture_of_another_form_is_refused(tiny_folder):
    class Wrong(Reporting):
        def render(self):
            return np.zeros((2, 3), dtype=np.float32)

    with workplace(tiny_folder, [Wrong(3)]) as place, pytest.raises(EnvError, match=r"draws float32 \[2, 3\]"):
        place.collect(1)
