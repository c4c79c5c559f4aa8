"""Forks: states are entered again, valued without bias, and nothing that is recorded changes by it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
import pytest
import torch

from agentrl_envs import TextEnv
from benchmarks.laboratory.cloning import PROMPT, Start, random_model
from benchmarks.laboratory.exact import tables
from benchmarks.laboratory.policy import LastWord, PolicyReader
from lightning_agentrl.advantages import GRPO, Forked, minus_state_values
from lightning_agentrl.agents.checks import check_forks
from lightning_agentrl.distributed import Sum
from lightning_agentrl.episodes.episode import Moment
from lightning_agentrl.episodes.generators import generators
from lightning_agentrl.episodes.sides import SidesInteraction
from lightning_agentrl.errors import EnvError
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    FullMemory,
    GroupRollout,
    Memory,
    RolloutDataModule,
    TurnInteraction,
    WindowMemory,
    forks,
)
from lightning_agentrl.rollout.ahead import misfit
from lightning_agentrl.types import ForkPlan, Rollout, Sample, StopReason, rollout_from_plain, rollout_to_plain
from tests.rollout.scripted import Learner, story
from tests.types.samples import action, prompt
from tests.types.samples import turn as turn_of

GAMMA, LIMIT, ENVS, TURNS = 0.9, 7, 8, 4
PLAN = ForkPlan(branches=3, every=1, gamma=GAMMA)
GAME = "benchmarks.laboratory.key_door:KeyDoor-v0"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of one word, each move about as likely as the other."""
    return random_model(Start(7), tmp_path_factory.mktemp("words") / "model")


@contextmanager
def data_module(
    model: Path, plan: ForkPlan | None = PLAN, env: EnvConfig | None = None, envs: int = ENVS, **settings: Any
) -> Iterator[RolloutDataModule]:
    turns = {} if "groups" in settings else {"turns_per_env": TURNS, "mini_batch_turns": ENVS * TURNS}
    data = RolloutDataModule(
        env=env or EnvConfig(GAME, {"horizon": 7, "lure": 0.5, "limit": LIMIT}),
        num_envs=envs,
        prompt=replace(PROMPT, max_prompt_tokens=400),
        **{"memory": WindowMemory(0), "interaction": TurnInteraction(1, LastWord()), "seed": 5, **turns, **settings},
    )
    learner = Learner(model)
    learner.forks = plan
    data.setup("fit")
    learner.connect(data)
    try:
        yield data
    finally:
        data.teardown("fit")


def collected(count: int, *args: Any, **settings: Any) -> list[Rollout]:
    with data_module(*args, **settings) as data:
        return [data.stream.collect() for _ in range(count)]


def forked(rollout: Rollout) -> list[tuple]:
    return [(turn.env, turn.episode, turn.index, turn.branch_returns) for turn in rollout.turns]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [WindowMemory(0), WindowMemory(2), FullMemory()], ids=["none", "window", "grows"])
def test_what_is_recorded_stays_as_it_was_and_all_states_have_values(words: Path, memory: Memory):
    with_forks = collected(3, words, memory=memory)
    assert [story(x) for x in with_forks] == [story(x) for x in collected(3, words, None, memory=memory)]
    for rollout in with_forks:
        assert rollout.state_values is not None
        assert rollout.forked_end_values is not None
        valued = (~rollout.state_values.isnan() & rollout.action_mask).sum()
        assert valued == len(rollout.turns) == ENVS * TURNS
        assert all(len(turn.branch_returns) == PLAN.branches for turn in rollout.turns)
        assert bool(rollout.forked_end_values.isfinite().all())
        played = sorted(rollout.turns, key=lambda turn: (turn.env, turn.episode, turn.index))
        cut = ENVS - sum(turn.done for turn in played[TURNS - 1 :: TURNS])
        assert rollout_numbers(rollout)["rollout/forked_states"] == Sum(ENVS * TURNS + cut)
        assert not rollout.forked_end_values[[sample.turns[-1].done for sample in rollout.samples]].any()
    assert any(bool(rollout.forked_end_values.any()) for rollout in with_forks)  # where the rollout cuts an episode


@pytest.mark.slow
def test_a_branch_that_repeats_the_record_is_not_played_again(words: Path, monkeypatch: pytest.MonkeyPatch):
    """And returns what it would have returned."""
    (once,) = collected(1, words)

    async def never(*_: Any) -> bool:
        return False

    monkeypatch.setattr(forks, "_reached", never)
    (again,) = collected(1, words)
    for a, b in zip(forked(once), forked(again), strict=True):
        assert a[:3] == b[:3]
        assert a[3] == pytest.approx(b[3], abs=1e-12)
    assert once.forked_end_values is not None
    torch.testing.assert_close(once.forked_end_values, again.forked_end_values, atol=1e-12, rtol=0)
    shared, alone = (sum(turn.forked_turns for turn in rollout.turns) for rollout in (once, again))
    assert shared < 0.9 * alone


def test_every_third_turn_and_the_first_one_are_forked(words: Path):
    for rollout in collected(2, words, replace(PLAN, every=3)):
        first = {}
        for turn in rollout.turns:
            first.setdefault((turn.env, turn.episode), turn.index)
        for turn in rollout.turns:
            chosen = turn.index % 3 == 0 or turn.index == first[turn.env, turn.episode]
            assert len(turn.branch_returns) == (PLAN.branches if chosen else 0)


def test_groups_are_forked_too(words: Path):
    sizes = GroupRollout(size=4, per_rollout=2, mini_batches=1)
    (rollout,) = collected(1, words, groups=sizes)
    assert [story(rollout)] == [story(x) for x in collected(1, words, None, groups=sizes)]
    assert all(len(turn.branch_returns) == PLAN.branches for turn in rollout.turns)
    assert rollout.forked_end_values is not None
    assert not rollout.forked_end_values.any()


@pytest.mark.slow
def test_how_many_play_at_a_time_and_a_resume_change_nothing(words: Path):
    sizes = GroupRollout(size=4, per_rollout=2, mini_batches=1)
    one, many = (collected(2, words, groups=sizes, envs=envs) for envs in (1, 8))
    assert [forked(x) for x in one] == [forked(x) for x in many]

    with data_module(words) as data:
        data.stream.collect()
        state = data.state_dict()
        rollout = data.stream.collect()
    want = forked(rollout)
    again = rollout_from_plain(rollout_to_plain(rollout))  # as a checkpoint holds one that was collected ahead
    assert forked(again) == want
    for name in ("state_values", "forked_end_values"):
        torch.testing.assert_close(getattr(again, name), getattr(rollout, name), equal_nan=True, rtol=0, atol=0)
    with data_module(words) as data:
        data.load_state_dict(state)
        assert forked(data.stream.collect()) == want


@pytest.mark.slow
@pytest.mark.parametrize("slip", [pytest.param(0.0, marks=pytest.mark.long), 0.3])
def test_values_are_those_of_dynamic_programming(words: Path, slip: float):
    """Without bias, within three standard errors over environments, also where the game draws random numbers."""
    env = EnvConfig(GAME, {"horizon": 7, "lure": 0.5, "slip": slip, "limit": LIMIT})
    start = Start(7, slip=slip, lure=0.5)
    game = tables(start.rules)
    policy_SA = PolicyReader(words, game.states, PROMPT, 1).table()
    values_HS = game.values_within(policy_SA, GAMMA, LIMIT)
    index = {state.words: place for place, state in enumerate(game.states)}
    envs = 128
    plan = ForkPlan(4, 1, GAMMA)
    off: list[list[float]] = [[] for _ in range(envs)]
    squares, bounds = [], []
    rollouts = collected(
        2,
        words,
        plan,
        env,
        envs,
        mini_batch_turns=envs * TURNS,
        interaction=TurnInteraction(1, LastWord(), invalid_penalty=0.0),
    )
    for turn in (turn for rollout in rollouts for turn in rollout.turns):
        exact = values_HS[LIMIT - turn.index, index[turn.observation]]
        value = float(np.mean(turn.branch_returns))
        off[turn.env].append(value - exact)
        squares.append((value - exact) ** 2)
        bounds.append(float(np.var(turn.branch_returns, ddof=1)) / plan.branches)
    means = np.array([np.mean(each) for each in off])
    assert abs(means.mean()) < 3 * means.std(ddof=1) / math.sqrt(envs)
    assert values_HS[LIMIT].max() > 0.01  # there is something to be off from
    assert np.mean(squares) == pytest.approx(np.mean(bounds), rel=0.5)  # K independent branches of each state


class Dice(TextEnv):
    """Pays what is thrown. A generator of its own, and one that a part of it holds, are thrown in turn."""

    actions = {"north": "", "south": "", "east": "", "west": "", "stay": ""}
    default_action, system_prompt = "stay", ""
    max_turns = 3

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.own = np.random.default_rng(self.np_random.integers(1000))
        self.parts = {"held": [np.random.RandomState(int(self.np_random.integers(1000)))]}
        self.thrown = 0.0

    def _act(self, action: str) -> tuple[float, bool]:
        self.thrown = float(self.own.integers(6)) + float(self.parts["held"][0].randint(6)) / 10
        return self.thrown, False

    def _observe(self) -> tuple[str, str]:
        return "k0", ""


gymnasium.register("Dice-v0", Dice)


def test_noise_is_new_in_each_branch_whatever_generator_it_comes_from(words: Path):
    """Replayed noise would make all branches of a state equal."""
    (rollout,) = collected(1, words, ForkPlan(4, 1, 1.0), EnvConfig("Dice-v0"))
    for turn in rollout.turns:
        assert len(set(turn.branch_returns)) > 1


class Faulty(Dice):
    """Fails in branches: where it is thrown anew."""

    def _act(self, action: str) -> tuple[float, bool]:
        reward, over = super()._act(action)
        if self.own.random() < 0.3 and self.forked:
            raise RuntimeError("a fault")
        return reward, over

    @property
    def forked(self) -> bool:
        return self.np_random.bit_generator.state["state"]["state"] != self.begun

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        super()._start(seed, options)
        self.begun = self.np_random.bit_generator.state["state"]["state"]


gymnasium.register("FaultyDice-v0", Faulty)


@pytest.mark.filterwarnings("ignore:.*its episode is lost")
def test_a_branch_that_is_lost_is_left_out(words: Path):
    faults = FaultLimits(in_a_row=1000, share=1.0)
    (rollout,) = collected(1, words, PLAN, EnvConfig("FaultyDice-v0", retries=0), faults=faults)
    counts = {len(turn.branch_returns) for turn in rollout.turns}
    assert len(counts) > 1
    assert rollout.state_values is not None
    for row, turn in enumerate(rollout.turns):
        assert math.isnan(float(rollout.state_values[row, 0])) == (not turn.branch_returns)


class Unsteady(Dice):
    """Raises in each fortieth reset of all environments, those of branches included."""

    resets: ClassVar[int] = 0

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        Unsteady.resets += 1
        if Unsteady.resets % 40 == 0:
            raise OSError("not now")
        super()._start(seed, options)


gymnasium.register("UnsteadyDice-v0", Unsteady)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*its episode is lost")
def test_a_branch_that_cannot_begin_is_left_out(words: Path):
    faults = FaultLimits(in_a_row=1000, share=1.0)
    rollouts = collected(3, words, PLAN, EnvConfig("UnsteadyDice-v0", retries=0), faults=faults)
    assert sum(len(turn.branch_returns) < PLAN.branches for rollout in rollouts for turn in rollout.turns) > 0


def test_generators_are_looked_for_in_what_is_the_environments_own():
    own, shared = np.random.default_rng(0), random.Random(0)
    env = SimpleNamespace(rules=random, np=np, draw=random.random, system=random.SystemRandom(), own=own, held=[shared])
    assert {id(one) for one in generators(env)} == {id(own), id(shared)}


def test_a_rollout_from_a_checkpoint_has_forks_where_the_run_needs_them(words: Path):
    (with_forks,), (without,) = collected(1, words), collected(1, words, None)
    assert misfit(without, ENVS, ENVS * TURNS, forks=True)
    assert not misfit(without, ENVS, ENVS * TURNS)
    assert not misfit(with_forks, ENVS, ENVS * TURNS, forks=True)


class Forgetful(Dice):
    deterministic = False


gymnasium.register("Forgetful-v0", Forgetful)


def test_an_environment_that_cannot_be_replayed_is_told(words: Path):
    with pytest.raises((EnvError, ValueError), match="cannot be forked"):
        collected(1, words, PLAN, EnvConfig("Forgetful-v0"))


def branch(number: int, rewards: list[float], **settings: Any) -> forks.ForkBranch:
    return forks.ForkBranch(cast(Moment, None), 0, number, rewards, **settings)


def test_returns_of_branches_are_discounted_on_into_what_they_join():
    """By hand: a half for each turn, also for those of the later branch that goes on alike."""
    later, first = (0, 0, 2), (0, 0, 0)
    branches = {
        first: [branch(0, [1.0, 0.0, 2.0]), branch(1, [1.0, 1.0], joins=later), branch(2, [3.0], lost=True)],
        later: [branch(0, [8.0]), branch(1, [4.0, 4.0]), branch(2, [])],
    }
    found = forks.returns_of(branches, 0.5)
    assert found[later] == [8.0, 4.0 + 0.5 * 4.0, 0.0]
    assert found[first][:2] == [1.0 + 0.25 * 2.0, 1.0 + 0.5 * 1.0 + 0.25 * 6.0]
    assert math.isnan(found[first][2])


def test_what_follows_a_fault_of_the_environment_is_not_known():
    ends = (StopReason.ENV_FAULT, StopReason.MAX_TURNS, None)
    turns = [turn_of(env=env, truncated=stop is not None, stop=stop) for env, stop in enumerate(ends)]
    rollout = Rollout.from_samples([Sample((prompt(1), action(2)), (one,)) for one in turns])
    after = forks.valued(rollout, {}, GAMMA).forked_end_values
    assert after is not None
    assert after.isnan().tolist() == [True, False, True]
    assert after[1] == 0


def test_unknown_values_give_no_advantage():
    nan = math.nan
    values = torch.tensor([[nan, 1.0, nan, 2.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    advantages, returns = minus_state_values(rewards, values, torch.tensor([nan], dtype=torch.float64), mask, 0.5)
    assert advantages.tolist() == [[0.0, 2 + 0.5 * 3 + 0.25 * 2 - 1, 2 + 0.5 * 3 + 0.25 * 2 - 1, 0.0]]
    assert returns.tolist() == [[1 + 0.5 * 1, 2 + 0.5 * 3 + 0.25 * 2, 3 + 0.5 * 2, 0.0]]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"groups": GroupRollout(size=2, per_rollout=2, mini_batches=1, ahead=2)}, "data.init_args.groups.ahead"),
        ({"interaction": SidesInteraction(1)}, "data.init_args.interaction"),
        ({"kl_in_reward": True}, "model.init_args.kl.reward"),
        ({"interaction": TurnInteraction(1, ask_again=1)}, "data.init_args.interaction.init_args.ask_again"),
    ],
    ids=["ahead", "sides", "kl", "asked again"],
)
def test_what_cannot_be_forked_is_refused_with_its_key(settings: dict[str, Any], key: str):
    given = {"groups": None, "interaction": TurnInteraction(1), "kl_in_reward": False} | settings
    with pytest.raises(ValueError, match=f"^Forked .*{key}"):
        check_forks(Forked(), **given)
    check_forks(GRPO(), **given)


@pytest.mark.parametrize(("plan", "part"), [((0, 1), "branches of at least 1"), ((3, 0), "every of at least 1")])
def test_numbers_of_branches_that_cannot_be_played_are_refused(plan: tuple[int, int], part: str):
    with pytest.raises(ValueError, match=part):
        ForkPlan(*plan, GAMMA)
