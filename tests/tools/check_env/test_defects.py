"""Seeded defects are found by their checks, and sound games are left alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import pytest

from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.tools.check_env import certificate
from lightning_agentrl.tools.check_env.certificate import Certificate, certify
from lightning_agentrl.tools.check_env.findings import Log
from tests.tools.check_env.defects import ASKED, AT_ONCE, ELSEWHERE, FOUND, Mine
from tests.tools.check_env.examined import examined

MINE, QUESTION, TOYS = (f"tests.tools.check_env.{name}" for name in ("defects:Mine-v0", "defects:Question-v0", "toys"))
QUICK = ("seed 0 is none", "win as cut", "reward for words")
SOUND = (
    *("agentrl_envs:Bandit-v0", "agentrl_envs:GuessNumber-v0"),
    *(f"{TOYS}:Toy{name}-v0" for name in ("Lake", "FixedLake", "Cliff", "Blackjack", "Taxi", "CartPole", "Car")),
    *(f"{TOYS}:Toy{name}-v0" for name in ("Quiz", "Trap", "Board")),
)
OURS_AGAIN = [pytest.param(name, marks=() if "Guess" in name or "Quiz" in name else pytest.mark.slow) for name in SOUND]


def half(names: Iterable[str]) -> list[tuple[str, Any]]:
    """Each with a parameter of that name, of which every other one is long."""
    marks = (pytest.mark.slow, pytest.mark.long)
    return [(name, pytest.param(name, marks=marks[number % 2])) for number, name in enumerate(names)]


def loud(log: Log) -> list[str]:
    return [name for name, finding in log.findings.items() if finding.severity != "notice"]


@pytest.mark.slow
@pytest.mark.parametrize("defect", [name if name in QUICK else param for name, param in half(FOUND)])
def test_a_defect_of_a_game_is_found(defect: str) -> None:
    assert FOUND[defect] in examined(MINE, defect=defect)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [param for _, param in half(ASKED)])
def test_a_defect_of_a_question_is_found(defect: str) -> None:
    assert ASKED[defect] in examined(QUESTION, defect=defect)


@pytest.mark.parametrize("defect", AT_ONCE)
def test_global_draws_and_rewards_not_finite_are_found(defect: str) -> None:
    """One defect at a time, so that each generator and each kind of number must be watched."""
    assert AT_ONCE[defect] in loud(examined(QUESTION, seconds=0.01, defect=defect))


@pytest.mark.parametrize("env_id", [MINE, QUESTION, *OURS_AGAIN])
def test_sound_games_are_left_alone(env_id: str) -> None:
    log = examined(env_id, seconds=4.0)
    assert loud(log) == []


@pytest.mark.slow
def test_messages_of_an_environments_own_are_an_observation() -> None:
    game = "tests.talking_game"
    found = examined(f"{game}:Talk-v0", seconds=4.0).findings
    assert not [name for name, finding in found.items() if finding.severity == "error"]
    assert not {"spaces.observation", "replay.used", "text.empty", "text.constant"} & found.keys()
    assert "text.type" in examined(f"{game}:Saying-v0", 4.0, messages=[{"role": "system", "content": "a"}]).findings


@pytest.mark.slow
def test_a_limit_that_is_declared_is_no_end_of_a_game() -> None:
    """What ends after as many turns without having declared them may be a game of so many lives or questions."""
    assert "ends.limit" in loud(examined(MINE, defect="limit as end"))
    assert examined(f"{TOYS}:ToyQuiz-v0").findings["ends.limit"].severity == "notice"


def test_pictures_that_cannot_be_asked_for_are_a_warning() -> None:
    gymnasium.register("Undrawn-v0", lambda: Mine())  # takes no render_mode
    try:
        assert loud(examined("Undrawn-v0")) == ["render.mode"]
    finally:
        del gymnasium.registry["Undrawn-v0"]


@pytest.fixture(scope="module")
def hashed() -> Certificate:
    return certify(MINE, {"defect": "hash"})


@pytest.mark.slow
def test_another_hash_seed_is_told_from_another_process(hashed: Certificate) -> None:
    assert [one["check"] for one in hashed.findings if one["severity"] == "error"] == ["replay.hash"]
    assert not hashed.passed
    assert hashed.cut == {}


@pytest.mark.slow
@pytest.mark.parametrize("defect", ELSEWHERE)
def test_what_ends_or_holds_up_the_process_is_found(defect: str) -> None:
    certificate = certify(MINE, {"defect": defect}, seconds=10.0)
    found = {one["check"]: one for one in certificate.findings}
    assert ELSEWHERE[defect] in found
    if defect == "dies":
        assert found["died"]["actions"] == ["'a' * 20000"]
        assert certificate.cut["closing"] == "not reached"


def test_evidence_can_be_repeated() -> None:
    """The seed and the actions of a finding lead to it again."""
    finding = examined(MINE, defect="win as cut").findings["ends.win"]
    env = Recipe(MINE, {"defect": "win as cut"}, "env").make()
    assert finding.seed is not None
    env.reset(seed=finding.seed)
    for action in finding.actions:
        _, reward, terminated, truncated, _ = env.step(eval(action))
    assert (float(reward), terminated, truncated) == (1.0, False, True)


def test_a_time_that_is_cut_is_named() -> None:
    assert "what replies earn" in examined(f"{TOYS}:ToyCliff-v0", seconds=0.01).cut


@pytest.mark.slow
def test_a_check_that_is_stopped_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C while one of two replays is heard: the other has a group of its own, which no terminal ends."""
    begun: list[int] = []

    class Noted(certificate._Process):
        def __init__(self, order: Mapping[str, Any], hash_seed: str) -> None:
            super().__init__(order, hash_seed)
            begun.append(self._process.pid)

        def hear(self, end: float) -> dict[str, Any] | None:
            if len(begun) == 3:  # that of the exam, and two that play again
                raise KeyboardInterrupt
            return super().hear(end)

    monkeypatch.setattr(certificate, "_Process", Noted)
    with pytest.raises(KeyboardInterrupt):
        certify("agentrl_envs:Bandit-v0", {}, seconds=2.0)
    assert len(begun) == 3
    for pid in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
