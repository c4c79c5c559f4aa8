"""Observations with images: what is taken, what is an error of the environment, and how they are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_agentrl.episodes.env_process import ProcessEnvironment
from lightning_agentrl.episodes.env_worker import EnvWorker, ReplayDiffersError, Start
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.errors.faults import EnvError
from tests.rollout.scripted import Scripted
from tests.seen_game import Corner

GAME = "tests.seen_game:Corner-v0"
GREY = np.full((8, 8, 3), 100, dtype=np.uint8)


class Showing(Scripted):
    """Shows what it is given, in every turn."""

    def __init__(self, observation: Any) -> None:
        super().__init__()
        self.observation = observation

    def _text(self) -> Any:
        return self.observation


def seen(observation: Any) -> Any:
    return Environment(lambda: Showing(observation)).reset(seed=0)


@pytest.mark.parametrize(
    ("observation", "count"),
    [
        ({"text": "a"}, 0),
        ({"images": [GREY]}, 1),
        ({"text": "a", "images": (GREY, GREY[:4])}, 2),
        ({"text": "a", "images": []}, 0),
    ],
)
def test_text_and_images_may_each_be_missing(observation: Any, count: int) -> None:
    answer = seen(observation)
    assert answer.observation == observation.get("text", "")
    assert [image.shape for image in answer.images] == [image.shape for image in observation.get("images", ())]
    assert len(answer.images) == count


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        ({"text": 3, "images": []}, "the text of an observation of type int"),
        ({"text": "", "images": GREY}, "the images of an observation of type ndarray"),
        ({"text": "", "images": ["a"]}, "an image of type str"),
        ({"text": "", "images": [GREY.astype(float)]}, r"float64 \[8, 8, 3\]"),
        ({"text": "", "images": [GREY[:, :, 0]]}, r"uint8 \[8, 8\]"),
        ({"text": "", "images": [GREY[:, :, :1]]}, r"uint8 \[8, 8, 1\]"),
        ({"text": "", "images": [GREY[:0]]}, r"uint8 \[0, 8, 3\]"),
        ({"text": "", "picture": GREY}, "an observation of type dict"),
        (GREY, "an observation of type ndarray"),
        (None, "an observation of type NoneType"),
    ],
)
def test_what_is_no_image_is_an_error_of_the_environment(observation: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said) as error:
        seen(observation)
    assert error.value.kind == "contract"


def test_an_image_stays_as_it_was_shown() -> None:
    """Games draw into one and the same array."""
    canvas = GREY.copy()
    answer = seen({"text": "", "images": [canvas]})
    canvas[:] = 0
    assert (answer.images[0] == 100).all()


def test_equal_texts_with_other_images_are_other_observations() -> None:
    one, other = ({"text": "a", "images": [image]} for image in (GREY, GREY + 1))
    assert seen(one).fingerprint == seen(one).fingerprint != seen(other).fingerprint
    assert seen({"text": "a", "images": [GREY, GREY]}).fingerprint != seen(one).fingerprint
    assert seen("a").fingerprint == "a"  # as checkpoints from before hold it


@pytest.mark.slow
def test_images_come_out_of_a_process() -> None:
    """As they are."""
    here = Environment(lambda: Corner())
    there = ProcessEnvironment(Recipe(GAME, {}, "env"))
    try:
        for one in (here.reset(seed=4), here.step("upper left")):
            other = there.reset(seed=4) if one.observation == "turn 0" else there.step("upper left")
            assert other.fingerprint == one.fingerprint
            assert np.array_equal(other.images[0], one.images[0])
    finally:
        there.close()


class Flickering(Corner):
    """Repeats its texts, but not its pictures."""

    def _look(self) -> Any:
        shown = super()._look()
        return {**shown, "images": [np.random.randint(0, 256, (48, 48, 3), dtype=np.uint8)]}


def test_a_replay_that_shows_something_else_is_found() -> None:
    worker = EnvWorker(lambda: Environment(Flickering))
    start = Start(0, 0, 1)
    answer = worker.reset_now(start)
    with pytest.raises(ReplayDiffersError, match="does not repeat its episode"):
        worker.replay_now(start, [], answer.fingerprint)
    worker = EnvWorker(lambda: Environment(Corner))
    assert worker.replay_now(start, [], worker.reset_now(start).fingerprint).images
