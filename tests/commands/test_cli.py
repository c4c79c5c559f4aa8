"""The command `agentrl`: wrong input beyond the table of test_wrong_inputs.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.agents import models
from lightning_agentrl.engines import Engine
from lightning_agentrl.errors.config_errors import class_names
from lightning_agentrl.tools.play import Person
from tests.cli import Command, Config, changed, sentence


def test_classes_that_a_command_makes_are_not_offered() -> None:
    assert issubclass(Person, Engine)
    assert "VLLMEngine" in class_names([Engine])
    assert "Person" not in class_names([Engine])


GROUPS = {"groups": {"size": 1, "per_rollout": 4}, "turns_per_env": 8, "mini_batch_turns": 128}  # their defaults
SPLIT = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 2},
}
UNMET: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a group of two": ("GRPO", GROUPS, ["GRPO", "data.init_args.groups.size", "1", "2"]),
    "scores from 0": (
        "MaxRL",
        GROUPS | {"groups": {"size": 2, "per_rollout": 4}},
        ["MaxRL", "model.init_args.kl.reward", "data.init_args.interaction.init_args"],
    ),
    "groups of a mean": (
        "GAE",
        {"model.init_args.policy_loss": {"class_path": "PPOClip", "init_args": {"aggregation": "prompt-mean"}}},
        ["prompt-mean", "data.init_args.groups", "model.init_args.policy_loss.init_args.aggregation"],
    ),
    "groups of a filter": (
        "GAE",
        {"model.init_args.group_filter": {"class_path": "DropEqualScores"}},
        ["DropEqualScores", "data.init_args.groups", "model.init_args.group_filter"],
    ),
}


@pytest.mark.slow
def test_models_are_not_split_over_ranks(config: Config, tmp_path: Path) -> None:
    """Processes have started by then, so the command runs in one of its own."""
    config = changed(changed(config, "trainer.strategy", SPLIT), "trainer.devices", 2)
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(tmp_path / "given.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "tensor_parallel_size 2" in ended.stderr
    assert "trainer.strategy" in ended.stderr


@pytest.mark.parametrize(
    "need",
    [pytest.param(need, marks=() if need == "a group of two" else pytest.mark.slow) for need in UNMET],
)
def test_what_an_estimator_needs_and_cannot_get_is_told_before_a_model_is_loaded(
    need: str, config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_causal_lm", None)
    advantage, changes, parts = UNMET[need]
    given = changed(config, "model.init_args.advantage", {"class_path": advantage})
    for key, value in changes.items():
        given = changed(given, key if "." in key else f"data.init_args.{key}", value)
    message = sentence(agentrl(config=given))
    for part in parts:
        assert part in message


@pytest.mark.slow
def test_of_two_config_files_the_one_with_the_fault_is_named(config: Config, tmp_path: Path, agentrl: Command) -> None:
    (tmp_path / "wrong.yaml").write_text("model:\n  class_path: PPOAgent\n  init_args:\n    lr_actr: 1\n")
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(config))
    for files in (["wrong.yaml", "right.yaml"], ["right.yaml", "wrong.yaml"]):
        message = sentence(agentrl("--config", files[0], "--config", files[1]))
        assert "(key model.init_args.lr_actr; wrong.yaml, line 4)" in message
    (tmp_path / "wrong.yaml").write_text("model:\n  init_args:\n    optim: {lr_actor: 1}\n")
    message = sentence(agentrl("--config", "wrong.yaml", "--config", "right.yaml"))
    assert "class_path" in message
    assert agentrl("--config", "right.yaml", "--config", "wrong.yaml")[0] == 0


WRONG_ITEMS: dict[str, tuple[Any, list[str]]] = {
    "environment key": ({"id": "x", "shar": 2}, ["no key 'shar' in EnvConfig", "envs[1].shar", "mean share?"]),
    "key of tasks": ({"path": "x", "shr": 2}, ["no key 'shr' in TaskSet", "envs[1].shr", "mean share?"]),
    "type": ({"path": "x", "share": "many"}, ["data.init_args.envs[1].share must be a number, got 'many'"]),
    "text": ("agentrl_envs:Bandit-v0", ["data.init_args.envs[1] must be keys of its own, as {path: ...} or {id: ...}"]),
    "scorer key": (
        {"path": "x", "scorer": {"class_path": "PatternMatch", "init_args": {"patern": "a"}}},
        ["data.init_args.envs[1].scorer.init_args.patern", "did you mean pattern?"],
    ),
    "constructor of a scorer": (
        {"path": "x", "scorer": {"class_path": "PatternMatch", "init_args": {"pattern": "("}}},
        ["is not a regular expression", "data.init_args.envs[1].scorer.init_args.pattern"],
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in WRONG_ITEMS])
def test_a_wrong_item_of_a_list_of_sources_has_its_place(case: str, config: Config, agentrl: Command) -> None:
    item, parts = WRONG_ITEMS[case]
    data = config["data"]["init_args"]
    data["envs"] = [data.pop("env"), item]
    message = sentence(agentrl(config=config))
    for part in parts:
        assert part in message
    assert "given.yaml, line" in message


def test_an_option_for_one_of_several_sources_is_refused(config: Config, agentrl: Command) -> None:
    data = config["data"]["init_args"]
    data["envs"] = [data.pop("env"), {"id": "agentrl_envs:GuessNumber-v0"}]
    for option in ("--data.init_args.envs.share=2", "--data.envs.id=x", "--data.init_args.envs[1].share=2"):
        message = sentence(agentrl(option, config=config))
        assert "does not say which of the sources" in message


@pytest.mark.slow
def test_a_list_of_sources_is_given_as_a_whole_on_the_command_line(config: Config, agentrl: Command) -> None:
    both = "[{id: 'agentrl_envs:Bandit-v0', share: 2}, {id: 'agentrl_envs:GuessNumber-v0'}]"
    config["data"]["init_args"]["envs"] = [config["data"]["init_args"].pop("env")]
    assert agentrl("--data.init_args.envs", both, config=config)[0] == 0


@pytest.mark.parametrize("number", ["5e-6", pytest.param("'1e-5'", marks=pytest.mark.slow)])
def test_numbers_that_yaml_reads_as_text_are_numbers(
    number: str, config: Config, tmp_path: Path, agentrl: Command
) -> None:
    (tmp_path / "more.yaml").write_text(f"model: {{init_args: {{optim: {{lr_actor: {number}}}}}}}\n")
    assert agentrl("--config", "more.yaml", config=config)[0] == 0


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_told(config: Config, tmp_path: Path, agentrl: Command) -> None:
    saving = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(tmp_path), "filename": "here"}}
    config = changed(config, "trainer.callbacks", [saving])
    assert agentrl(config=config)[0] == 0
    config = changed(changed(config, "ckpt_path", str(tmp_path / "here.ckpt")), "trainer.max_epochs", 2)
    config = changed(config, "model.init_args.critic", {"class_path": "SeparateCritic"})
    message = sentence(agentrl(config=config))
    for part in ("here.ckpt'", "critic.backbone", "model.init_args.critic", "line 1"):
        assert part in message


def test_a_model_folder_without_a_chat_template_is_told_before_the_weights_are_read(
    tiny_folder: Path, tmp_path: Path, config: Config, agentrl: Command
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):  # no weights at all
        (tmp_path / name).write_text((tiny_folder / name).read_text())
    message = sentence(agentrl(config=changed(config, "model.init_args.model", str(tmp_path))))
    assert "chat_template.jinja" in message


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("agentrl")
    done = subprocess.run([command, "fit", "--config", "nowhere.yaml"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("agentrl: the file '")
    assert done.stderr.endswith("nowhere.yaml' does not exist (argument --config)\n")
