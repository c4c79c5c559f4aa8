"""What a config changes in the words of an environment: prompts, actions and replies follow it, misfits are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.env_worker import Start
from lightning_agentrl.episodes.wording import Wording, check_wording, reworded
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.rollout import EnvConfig
from tests.agents.harness import make_data
from tests.agents.test_resume import changed as refused_on_resume
from tests.cli import Command, Config, changed, sentence

GAME = Contract(
    actions={"left": "one step left", "right": "one step right", "wait": "do nothing"},
    aliases={"go left": "left"},
    default_action="wait",
    system_prompt="Find the door.",
    examples=(("a wall", "left"),),
)
KEY = "data.init_args.env.wording"
BANDIT = "agentrl_envs:Bandit-v0"


def test_what_is_not_given_stays() -> None:
    assert reworded(GAME, Wording()) == GAME


def test_every_part_can_be_replaced() -> None:
    found = reworded(
        GAME,
        Wording("Go.", {"right": "east", "left": None}, {"west": "left", "go left": "right"}, "left", [("b", "right")]),
    )
    assert list(found.actions.items()) == [("right", "east"), ("left", "one step left")]  # in the order of the config
    assert found.aliases == {"go left": "right", "west": "left"}
    assert (found.default_action, found.system_prompt, found.examples) == ("left", "Go.", (("b", "right"),))


def test_actions_can_be_named_for_an_environment_that_names_none() -> None:
    found = reworded(Contract(), Wording(actions={"look": None, "wait": "do nothing"}, default_action="wait"))
    assert dict(found.actions) == {"look": "", "wait": "do nothing"}


def test_of_the_actions_of_a_later_turn_those_that_are_left_are_offered() -> None:
    wording = Wording(actions={"left": None, "wait": None})
    assert list(reworded(Contract(actions={"wait": "", "jump": ""}), wording).actions) == ["wait"]
    for later in (Contract(actions={"jump": ""}), Contract(actions={"left": ""}, default_action="jump")):
        with pytest.raises(EnvError):
            reworded(later, wording)


@pytest.mark.parametrize(
    ("wording", "key", "named"),
    [
        (Wording(actions={"lft": None}), f"{KEY}.actions", "left"),
        (Wording(actions={}), f"{KEY}.actions", ""),
        (Wording(aliases={"west": "lft"}), f"{KEY}.aliases", "left"),
        (Wording(actions={"right": None, "wait": None}, aliases={"west": "left"}), f"{KEY}.aliases", "right"),
        (Wording(default_action="rigt"), f"{KEY}.default_action", "right"),
        (Wording(actions={"left": None}), f"{KEY}.default_action", "wait"),
    ],
)
def test_names_that_do_not_fit_are_refused(wording: Wording, key: str, named: str) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        check_wording(GAME, wording, KEY)
    assert named in str(refused.value)


def test_actions_of_an_environment_of_free_text_are_refused() -> None:
    check_wording(Contract(free_text=True), Wording(system_prompt="Reply."), KEY)
    with pytest.raises(ConfigError, match="whole reply"):
        check_wording(Contract(free_text=True), Wording(default_action="left"), KEY)


@pytest.mark.parametrize("place", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_it_holds_wherever_the_environment_runs_and_in_every_turn(place: str) -> None:
    config = EnvConfig("agentrl_envs:GuessNumber-v0", worker=place, wording=Wording("Guess.", aliases={"uno": "1"}))
    worker = config.make_worker()
    try:
        answers = worker.reset_now(Start(0, 0, 1)), asyncio.run(worker.step("2"))
    finally:
        worker.close()
    for answer in answers:
        assert answer.contract.system_prompt == "Guess."
        assert answer.contract.aliases["uno"] == "1"
        assert answer.contract.aliases["one"] == "1"


@pytest.mark.slow
def test_a_config_gives_it_and_a_misfit_is_told_with_its_line(config: Config, agentrl: Command) -> None:
    words = {
        "system_prompt": "Dress.",
        "actions": {"hat": "for the sun", "umbrella": None},
        "aliases": {"sombrero": "hat"},
        "default_action": "umbrella",
        "examples": [["Weather: sun", "hat"]],
    }
    given = changed(config, "data.init_args.env", {"id": BANDIT, "wording": words})
    assert agentrl("--dry-run", config=given)[0] == 0
    listed = {**config, "data": {**config["data"], "init_args": dict(config["data"]["init_args"])}}
    del listed["data"]["init_args"]["env"]
    listed = changed(listed, "data.init_args.envs", [{"id": BANDIT, "wording": {**words, "default_action": "gloves"}}])
    message = sentence(agentrl("--dry-run", config=listed))
    for part in ("'gloves'", "data.init_args.envs[0].wording.default_action", "given.yaml, line", "hat, umbrella"):
        assert part in message


def test_another_wording_is_refused_on_resume(tiny_folder: Path) -> None:
    usual = make_data().pool.sources[0]
    env = EnvConfig(usual.id, usual.kwargs, wording=Wording(system_prompt="Go."))
    refused = refused_on_resume(tiny_folder, env=env)
    assert refused
    assert all("env.wording" in key for key in refused)
