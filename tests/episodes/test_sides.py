"""Games of several sides: each side's turns are an episode, and who did not move last is paid, too."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import pytest
import torch

from lightning_agentrl.advantages import GRPO, RLOO, ReMax
from lightning_agentrl.agents.selection import lost_rows
from lightning_agentrl.distributed import Mean
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses import DropEqualScores
from lightning_agentrl.metrics.rollout import group_numbers
from lightning_agentrl.rollout import EnvConfig, GroupRollout, RawParser, SidesInteraction
from lightning_agentrl.types import Rollout, StopReason
from tests.rollout.scripted import Learner, play_held_out, workplace
from tests.rollout.test_groups import data_module


class Rounds(gymnasium.Env):
    """The sides move in a given order; at its end each earns ten and its number."""

    def __init__(self, order: list[int], end: str = "terminated", sides: int = 3, silent: str = "") -> None:
        self.order, self.end, self.sides, self.silent = order, end, sides, silent

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.played = [0] * self.sides
        return self.shown()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        mover = self.order[sum(self.played)]
        self.played[mover] += 1
        over = sum(self.played) == len(self.order)
        text, info = self.shown()
        if over and self.silent != "side_rewards":
            info["side_rewards"] = [10.0 + side for side in range(self.sides)]
        ends = (over and self.end == "terminated", over and self.end == "truncated")
        return text, 10.0 + mover if over else 0.0, *ends, info

    def shown(self) -> tuple[str, dict[str, Any]]:
        side = self.order[min(sum(self.played), len(self.order) - 1)]
        info = {"side": side, "side_turns": list(self.played), "success": True}
        return f"side {side}, turn {self.played[side]}", {name: x for name, x in info.items() if name != self.silent}


class Sudden(Rounds):
    """Every third game is over before side 1 has moved."""

    games = 0

    def __init__(self) -> None:
        super().__init__([0, 1], sides=2)

    def reset(self, **settings: Any) -> tuple[str, dict[str, Any]]:
        self.games += 1
        self.order = [0] if self.games % 3 == 0 else [0, 1]
        return super().reset(**settings)


class Greedy(Learner):
    greedy_baseline = True


gymnasium.register("Rounds-v0", lambda: Rounds([0, 1, 0, 1], sides=2))
gymnasium.register("Sudden-v0", Sudden)
SIDES = SidesInteraction(max_reply_tokens=3, parser=RawParser())


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("order", [[0, 1, 0, 1], [1, 1, 0, 1, 1, 0], [2, 0, 2], [1]])
def test_the_turns_of_each_side_are_an_episode_with_its_reward_at_the_end(order, end, tiny_folder):
    with workplace(tiny_folder, [Rounds(order, end)], interaction=SIDES) as place:
        turns = place.episode(place.sessions[0])
    assert [turn.episode for turn in turns] == order
    assert [turn.observation for turn in turns] == [f"side {turn.episode}, turn {turn.index}" for turn in turns]
    for side in set(order):
        *before, last = [turn for turn in turns if turn.episode == side]
        assert [turn.index for turn in (*before, last)] == list(range(order.count(side)))
        assert [turn.done for turn in before] == [False] * len(before)
        assert [turn.reward for turn in before] == [0.0] * len(before)
        assert (last.terminated, last.truncated) == (end == "terminated", end == "truncated")
        assert last.stop is (StopReason.ENV_DONE if end == "terminated" else StopReason.ENV_TRUNCATED)
        assert last.reward == last.env_reward == last.episode_return == 10.0 + side
        assert last.success
        assert (last.bootstrap is not None) == (end == "truncated")


def test_a_side_returns_what_it_was_paid_on_the_way_and_nothing_of_the_others(tiny_folder):
    class Paid(Rounds):
        """Each turn before the last pays a hundredth of its mover's number and one."""

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            mover = self.order[sum(self.played)]
            text, reward, terminated, *rest = super().step(action)
            return text, reward if terminated else (1 + mover) / 100, terminated, *rest

    with workplace(tiny_folder, [Paid([0, 1, 0, 0, 1], sides=2)], interaction=SIDES) as place:
        turns = place.episode(place.sessions[0])
    assert [turn.env_reward for turn in turns] == pytest.approx([0.01, 0.02, 0.01, 10.01, 11.0])
    assert [turn.episode_return for turn in turns] == pytest.approx([0.01, 0.02, 0.02, 10.03, 11.02])


def test_who_moved_last_is_paid_what_it_has_earned(tiny_folder):
    env = Rounds([0, 1], sides=2)
    take = env.step
    env.step = lambda action: (taken := take(action)) and (taken[0], 0.0, *taken[2:])
    with workplace(tiny_folder, [env], interaction=SIDES) as place:
        session = place.sessions[0]
        message = r"gave the reward 0, and info\['side_rewards'\] 11 for side 1"
        with pytest.warns(UserWarning, match=message), pytest.raises(AssertionError):
            place.episode(session)


@pytest.mark.parametrize("silent", ["side", "side_turns", "side_rewards"])
def test_an_environment_that_does_not_say_whose_turn_it_is_breaks_the_contract(silent, tiny_folder):
    with workplace(tiny_folder, [Rounds([0, 1], silent=silent)], interaction=SIDES) as place:
        session = place.sessions[0]
        with pytest.warns(UserWarning, match=f"info\\['{silent}'\\]"), pytest.raises(AssertionError):
            place.episode(session)


@pytest.mark.parametrize("side", [-1, 3, "first", math.nan, math.inf])
def test_a_side_is_one_of_those_that_there_are(side, tiny_folder):
    env = Rounds([0, 1])
    tell = env.reset
    env.reset = lambda **given: (tell(**given)[0], {"side": side, "side_turns": [0, 0, 0]})
    with workplace(tiny_folder, [env], interaction=SIDES) as place:
        session = place.sessions[0]
        with pytest.warns(UserWarning, match="info\\['side'\\], a number from 0"), pytest.raises(AssertionError):
            place.episode(session)


HUGE = 10**5000  # with more figures than Python writes


@pytest.mark.parametrize(
    ("side_turns", "shown"),
    [([0, 0, 0], "0"), ([2, 0, 0], "2"), ([10**30, 0, 0], f"{10**30}"), ([1, 0], "1"), ([HUGE, 0, 0], "a value of .*")],
)
def test_the_turns_that_a_side_has_had_are_those_that_were_played(side_turns, shown, tiny_folder):
    env = Rounds([0, 0])
    step = env.step
    env.step = lambda action: (*step(action)[:4], {"side": 0, "side_turns": side_turns})
    with workplace(tiny_folder, [env], interaction=SIDES) as place:
        session = place.sessions[0]
        session.first_episode, session.episode.number = 1, 0  # so that the number of sides counts, too
        said = rf"info\['side_turns'\] has {shown} turns of side 0, which has had {len(side_turns) // 3}"
        with pytest.warns(UserWarning, match=said), pytest.raises(AssertionError):
            place.episode(session)


class Odd(Rounds):
    """It gives something as what the sides have earned."""

    def __init__(self, given: Any) -> None:
        super().__init__([0, 1])
        self.given = given

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, terminated, truncated, {**info, **({"side_rewards": self.given} if terminated else {})}


@pytest.mark.parametrize(
    "given", [5, [1.0], {"first": 1.0}, ["a", "b", "c"], [None, None, None], [10**400, 0, 0], [HUGE, 0, 0]]
)
def test_what_sides_have_earned_is_a_number_for_each(given, tiny_folder):
    with workplace(tiny_folder, [Odd(given)], interaction=SIDES) as place:
        session = place.sessions[0]
        message = r"info\['side_rewards'\] must have a number for each of 3 sides"
        with pytest.warns(UserWarning, match=message), pytest.raises(AssertionError):
            place.episode(session)


def test_half_games_and_second_questions_are_refused(tiny_folder):
    message = r"plays whole games; set data\.init_args\.groups"
    with (
        workplace(tiny_folder, [Rounds([0, 1])], interaction=SIDES) as place,
        pytest.raises(ConfigError, match=message),
    ):
        place.collect(2)
    again = SidesInteraction(max_reply_tokens=3, parser=RawParser(), ask_again=1)
    with workplace(tiny_folder, [Rounds([0, 1])], interaction=again) as place:
        session = place.sessions[0]
        with pytest.raises(ConfigError, match="ask_again"):
            place.episode(session)


def games(folder: str, env: str, size: int, learner: Learner | None = None) -> Rollout:
    """Two groups, played one after the other."""
    sizes, settings = GroupRollout(size=size, per_rollout=2), {"num_envs": 1, "interaction": SIDES}
    with data_module(folder, sizes, learner=learner, env=EnvConfig(env), **settings) as data:
        return data.stream.collect()


def sides_of(rollout: Rollout) -> list[int]:
    return [turn.episode % 2 for turn in rollout.turns]


def test_an_episode_is_compared_with_those_of_its_side(tiny_folder):
    rollout = games(tiny_folder, "Rounds-v0", 3, Greedy(tiny_folder))
    assert [turn.group for turn in rollout.turns] == [0] * 12 + [1] * 12
    assert len(rollout.groups.unique()) == 4
    scores = torch.tensor([10.0 + side for side in sides_of(rollout)])
    assert rollout.outcomes.tolist() == rollout.greedy_scores.tolist() == scores.tolist()
    for estimator in (GRPO(), RLOO(), ReMax()):
        assert not estimator.estimate(rollout)[0].any()
    assert not DropEqualScores()(rollout.groups, rollout.outcomes, rollout.episode).any()
    assert group_numbers(rollout)["rollout/equal_groups"] == Mean(4, 4)


def test_a_held_out_game_counts_once_for_each_side(tiny_folder):
    with data_module(tiny_folder, GroupRollout(2, 2), env=EnvConfig("Rounds-v0"), interaction=SIDES) as data:
        results = play_held_out(data, data.val_dataloader().seeds[:3])
    assert [result.total_reward for result in results] == [10.0, 11.0] * 3
    assert [result.turns for result in results] == [2, 2] * 3


def test_a_side_without_a_turn_is_no_lost_episode(tiny_folder):
    rollout = games(tiny_folder, "Sudden-v0", 3)
    assert sides_of(rollout) == [0, 1, 0, 1, 0] * 2
    assert not lost_rows(rollout, bootstraps=False, group_size=3).any()
    fewer = rollout.select([0, 1, 2, 3, *range(5, 10)])
    assert lost_rows(fewer, bootstraps=False, group_size=3).tolist() == [True] * 4 + [False] * 5


def test_a_side_without_a_turn_in_the_greedy_game_has_a_baseline_of_zero(tiny_folder):
    rollout = games(tiny_folder, "Sudden-v0", 2, Greedy(tiny_folder))
    assert sides_of(rollout) == [0, 1] * 4
    assert rollout.greedy_scores.tolist() == [10.0, 0.0] * 4
    assert not lost_rows(rollout, bootstraps=False, group_size=2).any()
