"""Where a wrong key stands: in which line of which file, or on the command line."""

from __future__ import annotations

import pytest

from lightning_agentrl.commands.places import places_of
from lightning_agentrl.errors import Problem
from tests.cli import Write

CONFIG = """\
model:
  class_path: PPOAgent
  init_args:
    lr_actor: fast
    critic: {class_path: SharedCritic, init_args: {popart: perhaps}}
trainer:
  callbacks:
    - StageProgress
    - class_path: CriticWarmup
      init_args: {rollouts: 3}
    - class_path: EarlyStopping
      init_args:
        monitor: val/sucess
"""


def where(problem: Problem, *arguments: str) -> list[str]:
    return [f"{place.where} ({place.key})" for place in places_of(problem, arguments)]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem("", key="model.init_args.lr_actor"), "a.yaml, line 4 (model.init_args.lr_actor)"),
        (Problem("", key="model.init_args.critic.init_args.popart"), "a.yaml, line 5"),  # flow style
        (Problem("", key="trainer.callbacks.init_args.rollouts"), "line 10 (trainer.callbacks[1].init_args.rollouts)"),
        (Problem("", key="trainer.callbacks[2].init_args.monitor"), "a.yaml, line 13 (trainer.callbacks[2]"),
        (Problem("", key="trainer.callbacks.class_path", value="CriticWarmup"), "a.yaml, line 9"),
        (Problem("", key="trainer.callbacks.class_path", value="StageProgress"), "a.yaml, line 8"),  # name alone
        (Problem("", key="trainer.callbacks.init_args", owner="EarlyStopping"), "a.yaml, line 12"),
        (Problem("", key="model.init_args.model", missing=True), "a.yaml, line 3 (model.init_args)"),
        (Problem("lower model.init_args.lr_actor, or model.init_args.lr_critic"), "a.yaml, line 4"),  # a sentence
    ],
)
def test_a_key_is_found_in_its_line(problem: Problem, expected: str, write: Write) -> None:
    write(a=CONFIG)
    (found,) = where(problem, "fit", "--config", "a.yaml")
    assert expected in found


@pytest.mark.parametrize(
    "problem",
    [
        Problem("", key="model.init_args.lr_critic"),  # a default
        Problem("", key="model.init_args.lr_actor", value="slow"),  # another value
        Problem("", key="trainer.callbacks.init_args"),  # of which callback?
        Problem("", key="model.init_args.critic.init_args.popart", owner="SeparateCritic"),  # another class
        Problem("something else"),
    ],
)
def test_no_place_is_better_than_a_wrong_one(problem: Problem, write: Write) -> None:
    write(a=CONFIG)
    assert where(problem, "--config", "a.yaml") == []


def test_a_key_that_an_anchor_brings_is_found_where_it_stands(write: Write) -> None:
    write(a="model: &m\n  init_args:\n    lr_actor: 1\ndata:\n  <<: *m\n  num_envs: 2\ntrainer: *m\n")
    assert where(Problem("", key="data.init_args.lr_actor"), "--config=a.yaml") == [
        "a.yaml, line 3 (data.init_args.lr_actor)"
    ]
    assert where(Problem("", key="trainer.init_args.lr_actor"), "-c", "a.yaml")[0].startswith("a.yaml, line 3")


def test_of_several_files_the_last_that_has_the_key_counts(write: Write) -> None:
    write(a=CONFIG, b="model:\n  init_args: {lr_actor: 1.0e-5}\n", c="data: {class_path: X}\n")
    files = ["--config", "a.yaml", "--config", "b.yaml", "--config", "c.yaml"]
    assert where(Problem("", key="model.init_args.lr_actor"), *files)[0].startswith("b.yaml, line 2")
    assert where(Problem("", key="model.init_args.lr_actor", value="fast"), *files)[0].startswith("a.yaml, line 4")


def test_arguments_without_a_class_are_looked_for_in_the_first_file(write: Write) -> None:
    write(a="model: {init_args: {lr_actor: 1}}\n", b=CONFIG, c="model: 3\n")
    problem = Problem("", key="model", classless=True)
    assert where(problem, "--config", "a.yaml", "--config", "b.yaml") == ["a.yaml, line 1 (model)"]
    assert where(problem, "--config", "b.yaml", "--config", "a.yaml") == []
    assert where(problem, "--config", "b.yaml", "--config", "c.yaml") == ["c.yaml, line 1 (model)"]


@pytest.mark.parametrize(
    "argument",
    [
        "--model.init_args.lr_actor=fast",
        "--model.lr_actor=fast",  # the parser takes this form, too
        "--model.init_args={lr_actor: fast}",
        "--model={class_path: PPOAgent, init_args: {lr_actor: fast}}",
    ],
)
def test_the_command_line_is_told_from_the_file(argument: str, write: Write) -> None:
    write(a=CONFIG)
    key = "model.init_args.lr_actor"
    for given in ([argument], argument.split("=", 1)):
        (found,) = where(Problem("", key=key, value="fast"), "--config", "a.yaml", *given)
        assert found.startswith("command line (model")
    assert where(Problem("", key=key), "--model.lr_actor=1", "--config", "a.yaml")[0].startswith("a.yaml, line 4")


def test_a_class_on_the_command_line_is_found(write: Write) -> None:
    problem = Problem("", key="model.class_path", value="PPOAgnt")
    assert where(problem, "--model=PPOAgnt") == ["command line (model.class_path)"]
    assert where(problem, "--model.class_path", "PPOAgnt") == ["command line (model.class_path)"]
    problem = Problem("", key="trainer.callbacks.init_args.patience", value="x")
    assert where(problem, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience=x")[0].startswith(
        "command"
    )


def test_what_a_further_file_may_hold_is_not_guessed(write: Write) -> None:
    write(a=CONFIG, b="model: agent.yaml\n")
    problem = Problem("", key="model.init_args.lr_actor")
    assert where(problem, "--config", "a.yaml", "--config", "b.yaml") == []
    assert where(problem, "--config", "a.yaml", "--model", "agent.yaml") == []


def test_what_holds_itself_ends_the_search(write: Write) -> None:
    write(a="trainer:\n  callbacks: &all [*all]\n", b="model: {<<: &one {<<: *one}}\n")
    problem = Problem("", key="trainer.callbacks.init_args.patience")
    assert where(problem, "--config", "a.yaml", "--trainer.callbacks", "&all [*all]") == []
    assert where(Problem("", key="model.init_args"), "--config", "b.yaml", "--model", "&one {<<: *one}") == []
