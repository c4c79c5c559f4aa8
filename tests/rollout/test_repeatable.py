"""What is sampled together follows from a fixed rule, so replies are equal to the bit whatever takes how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.rollout import EnvConfig, GroupRollout, RawParser, RolloutDataModule, TurnInteraction
from lightning_agentrl.rollout.validation import ValidationConfig
from lightning_agentrl.types import LATE
from tests.agents import repeated  # noqa: F401 - registers its environment
from tests.rollout.scripted import FREE_TEXT, Learner, LoggingEngine, Scripted, play_held_out, workplace

SIZES = {"turns_per_env": 4, "mini_batch_turns": 16}


def connected(folder: Any, engine: Engine, env: EnvConfig | None = None, **settings: Any) -> RolloutDataModule:
    data = RolloutDataModule(
        env or EnvConfig("Restless-v0"),
        num_envs=4,
        prompt=FREE_TEXT,
        interaction=TurnInteraction(12, RawParser()),
        validation=ValidationConfig(num_envs=3),
        engine=engine,
        seed=1,
        **settings,
    )
    learner = Learner(folder)
    learner.policy.float()  # where rounding shows
    data.setup("fit")
    learner.connect(data)
    return data


def sampled(folder: Any, settings: dict[str, Any], play: Callable[[RolloutDataModule], Any], **engine: Any) -> dict:
    """Every reply to the bit, by its request."""
    logging = LoggingEngine(**engine)
    data = connected(folder, logging, **settings)
    try:
        play(data)
    finally:
        data.teardown("fit")
    return {(r.number, r.seed, r.temperature, r.prompt.ids): (reply.ids, reply.logps) for r, reply in logging.log}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "play", "engine"),
    [
        (SIZES, lambda data: data.stream.collect(), {}),
        (SIZES, lambda data: data.stream.collect(), {"max_batch": 2, "admit_every": 4}),
        ({"groups": GroupRollout(2, 3, ahead=1)}, lambda data: data.stream.collect(), {}),
        (SIZES, lambda data: play_held_out(data, [5, 3, 9, 7, 1]), {}),
    ],
    ids=["turns", "waiting", "groups", "held out"],
)
def test_replies_are_equal_to_the_bit(tiny_folder, settings, play, engine):
    first = sampled(tiny_folder, settings, play, **engine)
    assert len(first) >= 10
    assert sampled(tiny_folder, settings, play, **engine) == first


def test_an_environment_over_its_time_is_noted_and_the_others_go_on(tiny_folder):
    """Environment 0 finishes its first step when environment 1 has made all of its own."""
    over = threading.Event()
    waits = Scripted(50, on_step=lambda count: over.wait(30) if count == 1 else None)
    goes_on = Scripted(50, on_step=lambda count: over.set() if count == 4 else None)
    with workplace(tiny_folder, [waits, goes_on]) as place:
        place.engine.stop()
        place.engine.absence_seconds = 0.2
        place.engine.start(PolicyHandle(place.policy, place.renderer.stop_token_ids, nullcontext))
        with pytest.warns(UserWarning, match="absence_seconds"):
            rollout = place.collect(4)
    errors = {(turn.env, turn.index): turn.env_errors for turn in rollout.turns}
    assert over.is_set()
    assert errors == {place: (LATE,) if place == (0, 1) else () for place in errors}
    assert len(errors) == 8
    numbers = rollout_numbers(rollout)
    assert numbers["env/errors/late"].total == 1


class Parrot(Engine):
    """Knows no seats."""

    def start(self, handle: PolicyHandle) -> None:
        self.ids = (7, handle.stop_token_ids[0])

    def sync(self, policy_version: int) -> None:
        self.version = policy_version

    async def generate(self, request: SamplingRequest) -> Reply:
        return Reply(self.ids, (-1.0, -1.0), True, self.version)

    def stop(self) -> None: ...


def test_an_engine_that_knows_no_players_works(tiny_folder):
    for settings in (SIZES, {"groups": GroupRollout(2, 3)}):
        data = connected(tiny_folder, Parrot(), **settings)
        try:
            assert {turn.reply for turn in data.stream.collect().turns} == {data.player.renderer.decode((7,))}
            assert len(play_held_out(data, [5, 3, 9, 7])) == 4
        finally:
            data.teardown("fit")
