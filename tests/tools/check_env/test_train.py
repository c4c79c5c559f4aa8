"""`agentrl check-env --train`: what the small model reads, and what is said of its curves."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import pytest

from agentrl_envs import TextEnv
from lightning_agentrl.commands import check_train
from lightning_agentrl.commands.check_train import NUM_ENVS, TURNS_PER_ENV, Texts, interval, points, train
from lightning_agentrl.tools.check_env.certificate import certify
from lightning_agentrl.tools.check_env.played import system_of

WALK = "You walk. {}"


@pytest.mark.parametrize(
    ("said", "system"),
    [
        ([("Rules.", "")], ""),
        ([("Rules.", "find the key"), ("Rules.", "find the door")], ""),
        ([(WALK.format("find the key"), "find the key"), (WALK.format("find the door"), "find the door")], "{mission}"),
        ([(WALK.format("find the key"), "find the key"), ("Run. find the door", "find the door")], None),
        ([(WALK.format("1"), ""), (WALK.format("2"), "")], None),
    ],
)
def test_a_small_model_reads_what_differs(said: list[tuple[str, str]], system: str | None) -> None:
    assert system_of(set(said)) == system


def test_an_interval_is_of_three_seeds() -> None:
    assert interval([1.0, 2.0, 3.0], 4.303) == pytest.approx({"mean": 2.0, "low": -0.4843, "high": 4.4843}, abs=1e-4)


@pytest.mark.parametrize(("length", "ends"), [(1, [1]), (4, [1, 2, 3, 4]), (30, list(range(3, 31, 3)))])
def test_points_cover_a_curve(length: int, ends: list[int]) -> None:
    curve = [float(step) for step in range(length)]
    found = points([curve, curve, curve])
    assert [one["iteration"] for one in found] == ends
    begins = [0, *ends]
    assert [one["mean"] for one in found] == [(begin + end - 1) / 2 for begin, end in zip(begins, ends, strict=False)]
    assert all(one["low"] == one["mean"] == one["high"] for one in found)


class Costly(TextEnv):
    """Takes nothing that is said, for which it takes one from the reward, as games that take whole replies do."""

    free_text = True
    max_turns = 1
    actions: ClassVar[dict[str, str]] = {}
    default_action = ""

    @property
    def system_prompt(self) -> str:
        return "Say [a] or [b]."

    def resolve_action(self, text: str) -> tuple[str, bool]:
        return text, False

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None: ...

    def _act(self, action: str) -> tuple[float, bool]:
        return -1.0, True

    def _observe(self) -> tuple[str, str]:
        return "say it", ""


gymnasium.register("Costly-v0", Costly)


@pytest.mark.slow
def test_invalid_replies_are_counted_as_random_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_train, "NUM_ENVS", 4)
    monkeypatch.setattr(check_train, "TURNS_PER_ENV", 2)
    texts = Texts(["say", "it", "or", ".", "[", "]", "a", "b"], ["[a]", "[b]"], False, "", 12)
    found = train("Costly-v0", {}, texts, [-1.0] * 10, iterations=1)
    assert found["curves"] == [[-1.0]] * 3
    assert found["verdict"] == "not seen"


@pytest.mark.slow
def test_a_game_with_missions_is_trained_on() -> None:
    env = "agentrl_envs:BabyAIText-GoToObjS4-v0"
    certificate = certify(env, {}, seconds=3.0)
    assert certificate.texts is not None
    returns = certificate.texts.pop("returns")
    texts = Texts(**certificate.texts)
    assert texts.system == "{mission}"
    assert texts.longest < 40  # words: the mission and the view, and none of the rules
    found = train(env, {}, texts, returns, iterations=1)
    assert [len(curve) for curve in found["curves"]] == [1, 1, 1]
    assert len(found["points"]) == 1
    assert f"of {NUM_ENVS * TURNS_PER_ENV} turns" in found["said"]
