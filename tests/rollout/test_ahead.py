"""One rollout is collected in the background: what happens when, what is saved, and how it ends."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator

import gymnasium
import pytest
import torch

from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.errors import EngineGoneError
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    GroupRollout,
    RawParser,
    RolloutDataModule,
    TurnInteraction,
)
from lightning_agentrl.rollout.stopping import Stopped
from tests.metrics.clock import FakeClock
from tests.rollout.scripted import FREE_TEXT, Learner, Scripted, play_held_out, story

GO, ARRIVED = threading.Event(), threading.Event()
FAILS = threading.Event()


class Held(Scripted):
    """Its steps wait until the test lets them go; breaks in the third step where the test says so."""

    def step(self, action):
        ARRIVED.set()
        assert GO.wait(30)
        if FAILS.is_set() and self.count == 2:
            raise OSError("the game has crashed")
        return super().step(action)


gymnasium.register("Held-v0", Held)
gymnasium.register("Scripted-v0", Scripted)


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    GO.set()
    FAILS.clear()
    ARRIVED.clear()
    yield
    GO.set()


def data_module(**settings) -> RolloutDataModule:
    defaults = {
        "env": EnvConfig("Held-v0", {"length": 3}, retries=0),
        "num_envs": 2,
        "turns_per_env": 2,
        "mini_batch_turns": 2,
        "prompt": FREE_TEXT,
        "interaction": TurnInteraction(4, RawParser()),
        "max_staleness": 1,
        "faults": FaultLimits(in_a_row=0),  # the first one ends the run
        "seed": 3,
    }
    return RolloutDataModule(**(defaults | settings))


@pytest.fixture
def connected(tiny_folder):
    modules: list[RolloutDataModule] = []

    def connect(data: RolloutDataModule, learner: Learner | None = None) -> RolloutDataModule:
        modules.append(data)
        data.setup("fit")
        (learner or Learner(tiny_folder)).connect(data)
        return data

    yield connect
    GO.set()
    for data in modules:
        data.teardown("fit")


def change(learner: Learner) -> None:
    """As an update does."""
    with torch.no_grad():
        for weight in learner.policy.parameters():
            weight.mul_(1.1)
    learner.policy_version += 1


class Probing(Learner):
    """Asks its engine for tokens when the weights were sent, as an agent does."""

    gone = False

    def after_sync(self):
        if self.gone:
            raise EngineGoneError("no server has been there for 7 s")


def test_an_engine_that_is_gone_when_the_next_rollout_is_begun_ends_the_run_as_a_signal_does(connected, tiny_folder):
    learner = Probing(tiny_folder)
    data = connected(data_module(), learner)
    data.stopping.begin(lambda: None)
    assert len(list(data.stream)) == 2
    learner.gone = True
    with pytest.raises(Stopped):
        list(data.stream)
    assert data.stopping.reason == "no server has been there for 7 s"
    assert data.preparing
    assert data.state_dict()["ahead"] is not None  # which the run goes on with


def test_a_rollout_comes_home_while_the_caller_does_something_else(connected, tiny_folder):
    """It is of the weights at its beginning, though these change while it is held; so is the rollout after it."""
    learner, other = Learner(tiny_folder), Learner(tiny_folder)
    data, twin = connected(data_module(), learner), connected(data_module(max_staleness=0), other)
    assert story(data.stream.collect()) == story(twin.stream.collect())
    GO.clear()
    ARRIVED.clear()
    data.collector.begin_next()
    assert ARRIVED.wait(30)
    change(learner)
    GO.set()
    ahead = data.stream.collect()
    assert story(ahead) == story(twin.stream.collect())
    assert {turn.policy_version for turn in ahead.turns} == {0}
    change(other)
    data.collector.begin_next()
    change(learner)
    ahead = data.stream.collect()
    assert story(ahead) == story(twin.stream.collect())
    assert {turn.policy_version for turn in ahead.turns} == {1}


def test_validation_waits_plays_the_current_weights_and_leaves_the_rollout(connected, tiny_folder):
    learner, other = Learner(tiny_folder), Learner(tiny_folder)
    data, twin = connected(data_module(), learner), connected(data_module(max_staleness=0), other)
    data.stream.collect()
    twin.stream.collect()
    data.collector.begin_next()
    expected = story(twin.stream.collect())
    change(learner)
    change(other)
    seeds = data.val_dataloader().seeds[:4]
    assert play_held_out(data, seeds) == play_held_out(twin, seeds)
    assert story(data.stream.collect()) == expected


def test_a_checkpoint_waits_and_holds_the_rollout(connected, tiny_folder, tmp_path):
    data, new = connected(data_module()), data_module()
    data.stream.collect()
    GO.clear()
    data.collector.begin_next()
    threading.Timer(0.2, GO.set).start()
    torch.save(data.state_dict(), tmp_path / "data.pt")
    expected = [story(data.stream.collect()), story(data.stream.collect())]
    new.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    connected(new)
    assert [story(new.stream.collect()), story(new.stream.collect())] == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_staleness": 0}, r"has turns that are 1 iterations old, and data\.init_args\.max_staleness is 0"),
        ({"turns_per_env": 1}, "has 4 turns of 2 environments, unlike the rollouts of this run"),
        ({"num_envs": 4}, "has 4 turns of 2 environments, unlike the rollouts of this run"),
    ],
)
def test_what_must_not_be_trained_on_is_named_and_collected_anew(connected, tiny_folder, settings, reason):
    data, learner = connected(data_module()), Learner(tiny_folder)
    data.stream.collect()
    data.collector.begin_next()
    state = data.state_dict()
    new = data_module(**settings)
    new.load_state_dict(state)
    learner.policy_version = 2  # an iteration is two steps
    connected(new, learner)
    with pytest.warns(UserWarning, match=rf"{reason}"):
        rollout = new.stream.collect()
    assert {turn.policy_version for turn in rollout.turns} == {2}
    assert len(rollout.turns) == new.sizes.turns_per_rollout


def test_an_error_is_raised_where_the_rollout_is_needed_and_the_environments_are_not_lost(connected):
    data, new, twin = connected(data_module()), data_module(), connected(data_module())
    data.stream.collect()
    twin.stream.collect()
    FAILS.set()
    data.collector.begin_next()
    state = data.state_dict()  # a checkpoint of the iteration that is over
    assert state["ahead"] is None
    with pytest.raises(EnvError, match="OSError: the game has crashed") as error:
        data.stream.collect()
    assert any("environment" in note and "in turn 2" in note for note in error.value.__notes__)
    FAILS.clear()
    new.load_state_dict(state)
    assert story(connected(new).stream.collect()) == story(twin.stream.collect())


def test_an_error_that_nobody_waits_for_is_told_at_the_end(connected):
    data = connected(data_module())
    data.stream.collect()
    FAILS.set()
    data.collector.begin_next()
    with pytest.warns(UserWarning, match="OSError"):
        data.teardown("fit")


def test_an_interrupt_ends_it_and_a_second_fit_goes_on_where_it_had_begun(connected, tiny_folder):
    learner, twin = Learner(tiny_folder), connected(data_module())
    data = connected(data_module(), learner)
    data.stream.collect()
    twin.stream.collect()
    GO.clear()
    ARRIVED.clear()
    data.collector.begin_next()
    assert ARRIVED.wait(30)
    threading.Timer(0.2, GO.set).start()  # the environment's own call cannot be interrupted
    data.on_exception(KeyboardInterrupt())
    learner.connect(data)
    assert story(data.stream.collect()) == story(twin.stream.collect())


def test_a_stuck_collection_is_named_while_the_trainer_works(connected):
    data = connected(data_module(stall_seconds=0.2))
    data.stream.collect()
    message = "in stage collect; waiting for step of environments 0, 1"  # on a slow machine not the first warning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GO.clear()
        data.collector.begin_next()
        end = time.monotonic() + 30
        with data.collector.clock.stage("update"):
            while not any(str(w.message).endswith(message) for w in caught):
                assert time.monotonic() < end
                time.sleep(0.01)
        GO.set()
        data.stream.collect()
    assert any(str(w.message).startswith("nothing has moved") for w in caught if str(w.message).endswith(message))


def test_progress_counts_only_while_somebody_waits(connected, tiny_folder):
    learner, reported = Learner(tiny_folder), []
    data = connected(data_module(), learner)
    data.stream.collect()
    learner.clock.listeners.append(lambda stage, done, total: reported.append((stage, done, total)))
    GO.clear()
    ARRIVED.clear()
    data.collector.begin_next()
    assert ARRIVED.wait(30)
    with learner.clock.stage("update", total=9):
        GO.set()
        end = time.monotonic() + 30
        while data.collector.ahead._done < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
    data.stream.collect()
    assert reported == [("collect", 0, 0), ("update", 0, 9), ("collect", 4, 4)]


def test_the_seconds_of_every_update_of_the_engine_are_told(connected, tiny_folder, monkeypatch):
    """Of those before a rollout that is waited for, before one in the background, and before held-out episodes."""
    now = FakeClock(monkeypatch)

    class Slow(TransformersEngine):
        def sync(self, policy_version: int) -> None:
            now.wait(0.5)
            super().sync(policy_version)

    def read() -> dict[str, float]:
        return over_ranks(learner.clock.read())

    learner = Learner(tiny_folder)
    data = connected(data_module(engine=Slow()), learner)
    data.stream.collect()
    assert read()["time/sync_seconds"] == 0.5
    data.collector.begin_next()
    assert read() == {"time/iteration_seconds": 0.5, "time/collect_seconds": 0.5, "time/sync_seconds": 0.5}
    data.stream.collect()
    assert "time/sync_seconds" not in read()
    data.collector.begin_next()
    play_held_out(data, data.val_dataloader().seeds[:2])
    numbers = read()
    assert (numbers["time/validate_seconds"], numbers["time/sync_seconds"]) == (0.5, 1.0)


class Foreign(Engine):
    """An engine of somebody who has not thought of this."""

    def start(self, handle: PolicyHandle) -> None: ...

    def sync(self, policy_version: int) -> None: ...

    async def generate(self, request: SamplingRequest) -> Reply:
        raise NotImplementedError

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -1}, r"data\.init_args\.max_staleness must be at least 0, got -1"),
        ({"engine": Foreign()}, r"^Foreign does not declare .* use VLLMEngine, VLLMServerEngine or TransformersEngine"),
        (
            {"groups": GroupRollout(2, 2, 1, ahead=2), "turns_per_env": 8, "mini_batch_turns": 128},
            r"begun 1 iteration ahead.* up to 2 iterations old; raise data\.init_args\.max_staleness from 1 to 2",
        ),
        (
            {"groups": GroupRollout(2, 2, 1, ahead=3), "turns_per_env": 8, "mini_batch_turns": 128},
            r"begun 2 iterations ahead.* raise data\.init_args\.max_staleness from 1 to 3 or lower .*groups\.ahead",
        ),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        data_module(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "bound"), [(0, 1), (2, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_no_turn_of_a_group_is_older_than_the_bound(connected, tiny_folder, ahead, bound):
    """And the oldest are as old as it allows."""
    learner = Learner(tiny_folder)
    groups = GroupRollout(size=2, per_rollout=2, mini_batches=1, ahead=ahead, ahead_turns=1)
    settings = {"turns_per_env": 8, "mini_batch_turns": 128, "groups": groups, "max_staleness": bound}
    data = connected(data_module(env=EnvConfig("Scripted-v0", {"length": 4}), **settings), learner)
    oldest = []
    for version in range(5):
        learner.policy_version = version
        rollout = data.stream.collect()
        data.collector.begin_next()
        oldest.append(version - min(turn.policy_version for turn in rollout.turns))
        assert all(turn.policy_version <= max(version - 1, 0) for turn in rollout.turns)
    assert max(oldest) == oldest[-1] == bound


def test_zero_keeps_nothing_apart(connected, tiny_folder):
    """No copy of the weights, and no rollout in the checkpoint."""
    learner = Learner(tiny_folder)
    data = connected(data_module(max_staleness=0), learner)
    data.stream.next_rollout()
    assert data.engine._batch.policy is learner.policy
    assert data.state_dict()["ahead"] is None
