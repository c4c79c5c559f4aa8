"""The first fault of a config that the parser has refused, and what a saved config holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.errors import ConfigError, Problem
from lightning_agentrl.errors.config_errors import Given

MODEL: dict[str, Any] = {"class_path": "PPOAgent", "init_args": {"model": "demo"}}
DATA: dict[str, Any] = {"class_path": "RolloutDataModule", "init_args": {"env": {"id": "agentrl_envs:Bandit-v0"}}}
Parse = Callable[..., Any]


class Parsed(Exception):
    """The config was taken."""


class Parsing(AgentCLI):
    """Stops before anything is built."""

    def before_instantiate_classes(self) -> None:
        raise Parsed(self.settings.as_dict())


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parse a config, with changes by top key, and arguments, for `fit` or for no command; gives what came of it."""

    def parse(*arguments: str, run: bool = True, **changes: Any) -> dict[str, Any]:
        config = {"model": MODEL, "data": DATA} | changes
        (tmp_path / "given.yaml").write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
        given = ["fit"] * run + ["--config", str(tmp_path / "given.yaml"), *arguments]
        monkeypatch.setattr(sys, "argv", ["agentrl", *given])
        with pytest.raises(Parsed) as end:
            Parsing(run=run)
        return end.value.args[0]

    return parse


@pytest.fixture
def refused(parse: Parse) -> Callable[..., Problem]:
    """What the parser's complaint became."""

    def refused(*arguments: str, **changes: Any) -> Problem:
        with pytest.raises(ConfigError) as error:
            parse(*arguments, **changes)
        return error.value.problem

    return refused


def data(**init_args: Any) -> dict[str, Any]:
    return {**DATA, "init_args": {**DATA["init_args"], **init_args}}


def test_a_right_config_is_taken(parse: Parse) -> None:
    assert parse()["model"]["class_path"] == "lightning_agentrl.PPOAgent"


FIRST = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"data": data(max_prompt_tokens=9)}, "data.init_args.max_prompt_tokens", "mean prompt.max_prompt_tokens?"),
        ({"data": data(memory={"class_path": "SharedCritic"})}, "data.init_args.memory.class_path", "known: ActionsO"),
        ({"data": data(env={"wording": {"tips": 1}})}, "data.init_args.env.wording.tips", "'tips' in Wording"),
        ({"data": data(prompt={"system": 3})}, "data.init_args.prompt.system", "must be text or null, got 3"),
        ({"data": data(env={"id": "x", "worker": "proces"})}, "data.init_args.env.worker", "mean process?"),
        ({"model": {"model": "demo"}}, "model", "needs a class_path"),
        ({"trainer": {"logger": [FIRST, {"class_path": "CSVLoger"}]}}, "trainer.logger[1].class_path", "CSVLogger?"),
        ({"trainer": {"logger": [FIRST, "TensorBoardLogger"]}}, "trainer.logger[1].init_args.save_dir", "is missing"),
        ({"model": {"class_path": "PPOAgent"}}, "model.init_args.model", "is missing"),
        ({"verbose": True}, "verbose", "no key 'verbose' at the top"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_named_with_its_key(
    changes: dict[str, Any], key: str, says: str, refused: Callable[..., Problem]
) -> None:
    found = refused(**changes)
    assert found.key == key
    assert says in found.sentence()


def test_classes_of_ones_own_are_named(
    refused: Callable[..., Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from lightning_agentrl.prompts import Memory\nclass Half(Memory):\n    def recall(self, past): ..."
    (tmp_path / "my_half_memory.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(data=data(memory={"class_path": "my_half_memory.Half"}))
    assert "my_half_memory.Half is abstract: it does not define longest" in found.sentence()
    assert refused(data=data(memory={"class_path": "my_half_memory.WindowMemry"})).suggestion == "WindowMemory"


def test_the_later_place_of_a_key_counts(tmp_path: Path) -> None:
    """Of several files the last that has the key, and the command line over all of them."""
    (tmp_path / "a.yaml").write_text(
        "model:\n  init_args:\n    optim: {lr_actor: 1}\ntrainer:\n  callbacks:\n  - a: 1\n"
    )
    (tmp_path / "b.yaml").write_text("model: {init_args: {optim: {lr_actor: 2}}}\n")
    files = [f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"]
    problem = Problem("", key="model.init_args.optim.lr_actor")
    assert Given(files[:1]).places(problem) == [f"{tmp_path}/a.yaml, line 3"]
    assert Given(files).places(problem) == [f"{tmp_path}/b.yaml, line 1"]
    assert Given([*files, "--model.optim.lr_actor", "3"]).places(problem) == ["command line"]
    assert Given(files).places(Problem("", key="trainer.callbacks[0].a")) == [f"{tmp_path}/a.yaml, line 6"]
    assert Given(files).places(Problem("", key="model.init_args.model")) == []
    assert Given(files).places(Problem("", key="model.init_args.model", missing=True)) == [f"{tmp_path}/b.yaml, line 1"]
    both = Problem("lower model.init_args.optim.lr_actor or trainer.callbacks[0].a")
    assert len(Given(files).places(both)) == 2


# Classes that have moved

MOVED = {  # where a class was, and under which name a saved config still has it
    "lightning_agentrl.rollout.memory.WindowMemory": "lightning_agentrl.rollout.WindowMemory",
    "lightning_agentrl.rollout.memory.FullMemory": "lightning_agentrl.rollout.FullMemory",
    "lightning_agentrl.rollout.interaction.TurnInteraction": "lightning_agentrl.rollout.TurnInteraction",
    "lightning_agentrl.engines.transformers_engine.TransformersEngine": "lightning_agentrl.engines.TransformersEngine",
}


@pytest.mark.parametrize(
    "deep", [pytest.param(deep, marks=pytest.mark.slow if i else ()) for i, deep in enumerate(MOVED)]
)
def test_a_saved_config_names_classes_as_it_did_before_they_moved(
    deep: str, parse: Parse, refused: Callable[..., Problem]
) -> None:
    """The public path works, and a path into a module is answered with the name that works."""
    name = deep.rsplit(".", 1)[1]
    key = next(key for key in ("memory", "interaction", "engine") if name.lower().endswith(key))
    assert parse(data=data(**{key: {"class_path": MOVED[deep]}}))["data"]["init_args"][key]["class_path"].endswith(name)
    found = refused(data=data(**{key: {"class_path": deep}}))
    assert found.suggestion == name
    assert parse(data=data(**{key: {"class_path": name}}))


def test_what_is_saved_is_a_public_path_that_can_be_given_again(parse: Parse) -> None:
    """Modules may move as long as rooms export their classes, since a module's path is never written."""
    kinds = {"memory": "WindowMemory", "interaction": "TurnInteraction", "engine": "TransformersEngine"}
    saved = parse(data=data(**{key: {"class_path": name} for key, name in kinds.items()}))["data"]
    for path in (saved["class_path"], *(saved["init_args"][key]["class_path"] for key in kinds)):
        assert path.count(".") in (1, 2)  # package, room if it is not one of the first names, class
    assert parse(data=saved)["data"] == saved
