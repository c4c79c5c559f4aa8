"""What an environment may offer: read through wrappers, checked when it is made, and told in the documentation."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from lightning_agentrl.episodes import observation
from lightning_agentrl.episodes.contract import TEXTS, Contract, ContractReader
from lightning_agentrl.episodes.env_worker import EnvWorker, Start
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.observation import read_flag, read_metrics
from lightning_agentrl.episodes.prompt_check import check_places
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.prompts import memory
from tests.rollout.scripted import Scripted

START = Start(0, 0, 1)


OF_A_CONFIG = ("texts", "text_names")  # what its system text asks for


def offering(**attributes: Any) -> gymnasium.Env:
    return type("Offering", (Scripted,), attributes)()


def read_contract(env: gymnasium.Env) -> Contract:
    return ContractReader().read(env)


def test_a_plain_environment_offers_nothing():
    assert read_contract(Scripted()) == Contract()


def test_what_is_offered_is_read_through_wrappers():
    class Polite(gymnasium.Wrapper):
        system_prompt = "Please walk."

    inner = offering(
        actions={"left": "one step left"},
        aliases={"go left": "left"},
        default_action="left",
        system_prompt="Walk.",
        mission="go to the ball",
        tips=None,
        examples=[("a wall", "left")],
        free_text=np.True_,
        tool_schemas=[{"name": "search"}],
        observation_role="tool",
        one_turn=False,
        render_mode="rgb_array",
        worker="inline",
    )
    assert read_contract(gymnasium.wrappers.TimeLimit(Polite(inner), 5)) == Contract(
        actions={"left": "one step left"},
        aliases={"go left": "left"},
        default_action="left",
        system_prompt="Please walk.",
        mission="go to the ball",
        examples=(("a wall", "left"),),
        free_text=True,
        tool_schemas=({"name": "search"},),
        observation_role="tool",
        render_mode="rgb_array",
        worker="inline",
    )


@pytest.mark.parametrize(
    "now",
    [
        {},
        {"actions": {"right": "", "left": "one step left"}},  # in another order
        {"actions": {"left": "two steps left", "right": ""}},
        {"system_prompt": "Run."},
        {"mission": "go to the key"},
        {"free_text": np.True_},
        {"examples": [("a door", "right")]},
        {"observation_role": "tool"},
    ],
)
def test_a_changed_attribute_is_read_again(now):
    before = {
        "actions": {"left": "one step left", "right": ""},
        "system_prompt": "Walk.",
        "mission": "go to the ball",
        "examples": [("a wall", "left")],
    }
    reader = ContractReader()
    first = reader.read(offering(**before))
    assert reader.read(offering(**before)) is first
    env = offering(**before | now)
    read, known = read_contract(env), reader.read(env)
    assert read == known
    assert list(read.actions) == list(known.actions)
    known.actions["up"] = ""  # no alias of the environment's dictionary
    assert "up" not in env.actions


def test_an_attribute_that_is_wrong_in_a_later_turn_is_refused():
    reader = ContractReader()
    reader.read(offering(actions={"left": ""}, default_action="left"))
    for wrong in ({"actions": {"left": None}}, {"default_action": "right"}, {"free_text": 0}):
        with pytest.raises(EnvError, match="attribute"):
            reader.read(offering(**{"actions": {"left": ""}, "default_action": "left"} | wrong))


def test_attributes_that_are_made_up_as_they_are_asked_for_are_found():
    class Wished(gymnasium.Wrapper):
        def __getattr__(self, name):
            if name == "mission":
                return "go home"
            raise AttributeError(name)

    assert read_contract(Wished(Scripted())).mission == "go home"


def test_texts_that_a_config_asks_for_are_read_in_every_turn_through_wrappers():
    class Diary(gymnasium.Wrapper):
        turns = 0
        private = property(lambda self: 1 / 0)

        @property
        def achievements(self) -> str:
            return "\n".join(f"- {number}" for number in range(self.turns))

    env, asked = (
        Diary(offering(mission="go", weather="rain", actions={"left": ""})),
        ("actions", "achievements", "mission"),
    )
    reader = ContractReader(asked)
    assert reader.read(env).places == {"mission": "go", "tips": "", "achievements": ""}
    env.turns = 2
    contract = reader.read(env)
    assert contract.places["achievements"] == "- 0\n- 1"
    check_places(asked, contract)
    assert contract.text_names == ()  # nothing else is looked at
    missing = ContractReader(("achievments", "turns")).read(env)
    assert missing.texts == {}
    assert {"achievements", "weather", "mission"} <= {*missing.text_names}
    assert not {"private", "turns", "actions"} & {*missing.text_names}
    with pytest.raises(
        ValueError, match=r"\{achievments\}.*did you mean \{achievements\}.*\{weather\}.*prompt\.system"
    ):
        check_places(("achievments",), missing)


WRONG = {
    "actions": [["left", "right"], {"left": None}, {1: "left"}, "left"],
    "aliases": [[("go left", "left")], {"go left": ["left"]}],
    "default_action": [None, 0],
    "system_prompt": [None, ["Walk."], b"Walk."],
    "examples": ["left", [("a wall",)], [("a wall", "left", "right")], [("a wall", 1)], {"a wall": "left"}],
    "free_text": ["no", 1, None],
    "tool_schemas": [{"name": "search"}, ["search"], [{"function": {"title": "search"}}], [{"name": "a", "b": {1}}]],
    "observation_role": ["system", None],
    "one_turn": ["yes", 0],
    "render_mode": [["rgb_array"]],
    "worker": ["thread", "fork", True],
    "deterministic": ["no", 0],
}


def test_every_attribute_has_wrong_values():
    assert {*WRONG, *TEXTS, *OF_A_CONFIG} == {one.name for one in fields(Contract)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_type_is_refused_at_the_first_reset(name, value):
    with pytest.raises(EnvError, match=rf"attribute `{name}` is .*; it must be ") as error:
        EnvWorker(lambda: Environment(lambda: offering(**{name: value})), retries=2).reset_now(START)
    assert error.value.kind == "contract"
    assert repr(value) in str(error.value)


def test_a_forgotten_property_is_named_at_the_first_reset():
    with pytest.raises(EnvError, match="`system_prompt` is a method; write @property above it"):
        Environment(lambda: offering(system_prompt=lambda self: "Walk.")).reset(0)


@pytest.mark.parametrize("value", [lambda self: "look", 7, None])
def test_names_that_an_environment_uses_for_itself_are_left_to_it(value):
    contract = read_contract(offering(mission=value, tips=value))
    assert (contract.mission, contract.tips) == ("", "")


def test_a_default_action_has_to_be_an_action():
    with pytest.raises(EnvError, match="`default_action` is 'wait', which is not one of its actions: left, right"):
        read_contract(offering(actions={"left": "", "right": ""}, default_action="wait"))
    read_contract(offering(default_action="wait"))  # where no action has a name, it is a text like any other


@pytest.mark.parametrize("kind", [property, cached_property])
def test_properties_may_need_an_episode_and_are_checked_in_it(kind):
    def system_prompt(self: Any) -> Any:
        return {7: "Go to the ball.", 8: 8}[self.np_random_seed]

    prompt = kind(system_prompt)
    if kind is cached_property:
        prompt.__set_name__(None, "system_prompt")
    environment = Environment(lambda: offering(system_prompt=prompt))
    assert environment.reset(7).contract.system_prompt == "Go to the ball."
    environment = Environment(lambda: offering(system_prompt=prompt))
    with pytest.raises(EnvError, match="`system_prompt` is 8"):
        environment.reset(8)


def test_a_property_that_fails_is_not_taken_for_none():
    class Broken(Scripted):
        @property
        def actions(self) -> dict[str, str]:
            return self.mission.actions

    worker = EnvWorker(lambda: Environment(lambda: gymnasium.wrappers.TimeLimit(Broken(), 5)))
    with pytest.raises(EnvError, match="'Broken' object has no attribute 'mission'"):
        worker.reset_now(START)


def test_actions_of_a_turn_stay_those_of_the_turn():
    """Also where an environment changes one dictionary in place."""

    class Growing(Scripted):
        actions = {"left": ""}

        def step(self, action: str) -> Any:
            self.actions["jump"] = ""
            return super().step(action)

    environment = Environment(Growing)
    first = environment.reset(0).contract
    second = environment.step("left").contract
    assert (list(first.actions), list(second.actions)) == (["left"], ["left", "jump"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"info": None}, "an info of type NoneType; it must be a dictionary"),
        ({"info": {"short_term_text": 3}}, r"info\['short_term_text'\] of type int; it must be text"),
        ({"info": {"metrics": {"mood": "good"}}}, r"info\['metrics'\] = .*'good'.*, which must be a dictionary"),
        ({"info": {"metrics": 3}}, r"info\['metrics'\] = 3, which must be a dictionary of names and numbers"),
        (
            {"info": {"metrics": {"gold": 10**400}}},
            r"info\['metrics'\] = \{'gold': 1000.*must be a dictionary of names and numbers",
        ),
        ({"info": {"progression": 10**400}}, r"info\['progression'\] = 1000.*, which must be a number"),
        ({"info": {"progression": "half"}}, r"info\['progression'\] = 'half', which must be a number"),
        *(
            ({"info": {"metrics": {name: 1}}}, rf"'{name}' in info\['metrics'\], which is reserved")
            for name in ("errors/mine", "lost/mine", "retries")
        ),
        ({"info": {"metrics": {"gold": 1, "judge": 1}}}, r"'judge' in info\['metrics'\], which is reserved"),
        ({"observation": 7}, "an observation of type int; observations must be text"),
        ({"reward": "much"}, "a reward of type str; it must be a number"),
    ],
)
def test_an_answer_of_another_form_is_a_breach_of_the_contract(change, message):
    class Other(Scripted):
        def step(self, action: str) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return (
                change.get("observation", observation),
                change.get("reward", reward),
                terminated,
                truncated,
                change.get("info", info),
            )

    environment = Environment(Other)
    environment.reset(0)
    with pytest.raises(EnvError, match=message) as error:
        environment.step("left")
    assert error.value.kind == "contract"


def test_numbers_of_an_environment():
    assert read_metrics({"progression": True, "metrics": {"wood": np.float32(0.5)}}) == {
        "progression": 1.0,
        "wood": 0.5,
    }
    assert read_metrics({}) == {}


def test_prompts_and_environments_mean_the_same():
    """Two rooms that do not import each other."""
    assert observation.OwnMessages == memory.OwnMessages


def test_the_documentation_lists_the_attributes():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    table = page[page.index("| attribute |") :].split("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert listed == [one.name for one in fields(Contract) if one.name not in OF_A_CONFIG]


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), np.int64(1)])
def test_truth_values_may_be_numpys(value: Any) -> None:
    assert read_flag("terminated", value) is True
    assert read_flag("terminated", type(value)(0)) is False


@pytest.mark.parametrize("value", [None, 2, 1.0, "True", np.array(True), np.array([0, 1]), np.float64(1)])
def test_what_is_no_truth_value_is_named(value: Any) -> None:
    with pytest.raises(EnvError, match=r"gave terminated = .*; it must be true or false"):
        read_flag("terminated", value)
