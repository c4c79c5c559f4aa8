"""Games of several sides: each side's turns are an episode, and who did not move last is paid, too."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import RawParser, SidesInteraction
from lightning_agentrl.types import StopReason
from tests.rollout.scripted import workplace


class Rounds(gymnasium.Env):
    """The sides move in a given order; at its end each earns ten and its number."""

    def __init__(self, order: list[int], end: str = "terminated", sides: int = 3, silent: str = "") -> None:
        self.order, self.end, self.sides, self.silent = order, end, sides, silent

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.played = [0] * self.sides
        return self.told()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        mover = self.order[sum(self.played)]
        self.played[mover] += 1
        over = sum(self.played) == len(self.order)
        text, info = self.told()
        if over and self.silent != "side_rewards":
            info["side_rewards"] = [10.0 + side for side in range(self.sides)]
        ends = (over and self.end == "terminated", over and self.end == "truncated")
        return text, 10.0 + mover if over else 0.0, *ends, info

    def told(self) -> tuple[str, dict[str, Any]]:
        side = self.order[min(sum(self.played), len(self.order) - 1)]
        info = {"side": side, "side_turns": list(self.played), "success": True}
        return f"side {side}, turn {self.played[side]}", {name: x for name, x in info.items() if name != self.silent}


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


@pytest.mark.parametrize("silent", ["side", "side_turns", "side_rewards"])
def test_an_environment_that_does_not_say_whose_turn_it_is_breaks_the_contract(silent, tiny_folder):
    with workplace(tiny_folder, [Rounds([0, 1], silent=silent)], interaction=SIDES) as place:
        session = place.sessions[0]
        with pytest.warns(UserWarning, match=f"info\\['{silent}'\\]"), pytest.raises(AssertionError):
            place.episode(session)


def test_half_games_and_second_questions_are_refused(tiny_folder):
    told = r"plays whole games; set data\.init_args\.groups"
    with workplace(tiny_folder, [Rounds([0, 1])], interaction=SIDES) as place, pytest.raises(ConfigError, match=told):
        place.collect(2)
    again = SidesInteraction(max_reply_tokens=3, parser=RawParser(), ask_again=1)
    with workplace(tiny_folder, [Rounds([0, 1])], interaction=again) as place:
        session = place.sessions[0]
        with pytest.raises(ConfigError, match="ask_again"):
            place.episode(session)
