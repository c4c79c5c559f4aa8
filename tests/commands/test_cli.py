"""The command `agentrl`: wrong input ends in a sentence and exit code 2; runs that start are in test_cli_runs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.agents import models
from lightning_agentrl.engines import Engine
from lightning_agentrl.errors.names import class_names
from lightning_agentrl.tools.play import Person
from tests.cli import Command, Config, changed, sentence


@pytest.fixture(autouse=True)
def no_half_begun_logger() -> Iterator[None]:
    """Weights & Biases that was refused keeps its settings, for whatever test comes next."""
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


WRONG = {
    "top": ("modle", {"class_path": "PPOAgent"}, ["modle", "model?"]),
    "empty top": ("modle", {}, ["modle", "model?"]),
    "trainer key at the top": ("max_epochs", 3, ["max_epochs", "trainer, model, data", "trainer.max_epochs?"]),
    "model key": ("model.init_args.lr_actr", 1e-3, ["model.init_args.lr_actr", "PPOAgent", "lr_actor?"]),
    "data key": ("data.init_args.num_env", 3, ["data.init_args.num_env", "num_envs?"]),
    "trainer key": ("trainer.max_epoch", 3, ["trainer.max_epoch", "max_epochs?"]),
    "prompt key": ("data.init_args.prompt", {"thnk": 1}, ["data.init_args.prompt.thnk", "think?"]),
    "env key": ("data.init_args.env", {"idd": "x"}, ["data.init_args.env.idd", "id?"]),
    "both forms": ("data.init_args.envs", [{"path": "x"}], ["data.init_args.env ", "data.init_args.envs"]),
    "memory key": (
        "data.init_args.memory",
        {"class_path": "WindowMemory", "init_args": {"turn": 1}},
        ["data.init_args.memory.init_args.turn", "turns?"],
    ),
    "callback key": (
        "trainer.callbacks",
        [{"class_path": "StageProgress"}, {"class_path": "CriticWarmup", "init_args": {"rollout": 1}}],
        ["trainer.callbacks[1].init_args.rollout;", "CriticWarmup", "rollouts?"],
    ),
    "agent class": ("model.class_path", "PPOAgnt", ["model.class_path", "PPOAgnt", "PPOAgent?"]),
    "critic class": (
        "model.init_args.critic",
        {"class_path": "SharedCritik"},
        ["Critic", "model.init_args.critic", "SeparateCritic, SharedCritic", "SharedCritic?"],
    ),
    "class of another kind": (
        "data.init_args.memory",
        {"class_path": "SharedCritic"},
        ["'SharedCritic'", "data.init_args.memory", "FullMemory, NotebookMemory, WindowMemory"],
    ),
    "nested class": (
        "data.init_args.interaction.init_args.parser",
        {"class_path": "TolerantParsr"},
        ["data.init_args.interaction.init_args.parser.class_path", "RawParser", "TolerantParser?"],
    ),
    "class of a missing module": (
        "data.init_args.memory",
        {"class_path": "my_code.MyMemory"},
        ["my_code.MyMemory", "data.init_args.memory.class_path", "my_code"],
    ),
    "callback class": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmp"}],
        ["trainer.callbacks[0].class_path", "CriticWarmup?"],
    ),
    "no class_path": ("model", {"model": "demo"}, ["class_path", "PPOAgent"]),
    "no class": ("data.init_args.memory", 3, ["data.init_args.memory", "class_path", "WindowMemory"]),
    "int": ("data.init_args.num_envs", "many", ["data.init_args.num_envs", "'many'"]),
    "float": ("model.init_args.optim.lr_actor", "fast", ["model.init_args.optim.lr_actor", "'fast'"]),
    "bool": ("data.init_args.prompt", {"think": "maybe"}, ["prompt.think", "true", "false", "'maybe'"]),
    "list for an int": ("data.init_args.turns_per_env", [1, 2], ["data.init_args.turns_per_env", "'[1, 2]'"]),
    "float for an int": ("data.init_args.num_envs", 4.5, ["data.init_args.num_envs", "'4.5'"]),
    "choice": ("model.init_args.kl.reward_kind", "k9", ["model.init_args.kl.reward_kind", "'k3'", "'k9'"]),
    "misspelt choice": ("model.init_args.kl.reward_kind", "K3", ["'k1'", "'K3'", "k3?"]),
    "type in a dataclass": (
        "data.init_args.validation.episodes",
        "all",
        ["validation.episodes", "'all'"],
    ),
    "type in a callback": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmup", "init_args": {"rollouts": "many"}}],
        ["trainer.callbacks.init_args.rollouts", "'many'"],
    ),
    "type in trainer": ("trainer.max_epochs", "many", ["trainer.max_epochs", "'many'"]),
    "missing argument": ("model.init_args", {}, ["model.init_args.model"]),
    "environment": ("data.init_args.env.id", "agentrl_envs:Bandt-v0", ["Bandt-v0", "data.init_args.env.id", "Bandit"]),
    "environment argument": (
        "data.init_args.env.kwargs",
        {"arm": 2},
        ["data.init_args.env.kwargs", "'arm'"],
    ),
    "environment module": ("data.init_args.env.id", "my_games:Chess-v0", ["my_games", "data.init_args.env.id"]),
    "model folder": ("model.init_args.model", "./no/such/folder", ["./no/such/folder", "model.init_args.model"]),
    "model on the hub": ("model.init_args.model", "nobody/nothing", ["nobody/nothing", "model.init_args.model"]),
    "no environments": ("data.init_args.num_envs", 0, ["data.init_args.num_envs", "1", "0"]),
    "mini-batches": ("data.init_args.mini_batch_turns", 3, ["data.init_args.mini_batch_turns", "8", "3"]),
    "long memory": (
        "data.init_args.memory.init_args.turns",
        200,
        ["WindowMemory", "200", "data.init_args.memory", "data.init_args.prompt.max_prompt_tokens"],
    ),
    "long prompts": (
        "data.init_args.prompt",
        {"max_prompt_tokens": 2048},
        ["2048", "data.init_args.prompt.max_prompt_tokens"],
    ),
    "constructor": ("model.init_args.temperature", 0.0, ["temperature", "model.init_args"]),
    "nested constructor": (
        "data.init_args.memory.init_args.turns",
        -1,
        ["turns", "-1", "data.init_args.memory.init_args"],
    ),
    "callback constructor": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmup", "init_args": {"rollouts": 3}}],
        ["rollouts", "fraction", "trainer.callbacks"],
    ),
    "dataclass constructor": (
        "data.init_args.validation.episodes",
        10**6,
        ["1000000", "data.init_args.validation.episodes"],
    ),
    "seed": ("seed_everything", -1, ["seed_everything", "-1"]),
    "clipping": (
        "trainer.gradient_clip_val",
        1.0,
        ["trainer.gradient_clip_val", "init_args.optim.max_grad_norm_actor"],
    ),
    "accumulation": (
        "trainer.accumulate_grad_batches",
        4,
        ["trainer.accumulate_grad_batches", "data.init_args.mini_batch_turns"],
    ),
    "limited iterations": ("trainer.limit_train_batches", 1, ["trainer.limit_train_batches", "mini_batch_turns"]),
    "last iteration cut": ("trainer.max_steps", 3, ["trainer.max_steps", "3", "2"]),
    "precision": ("trainer.precision", "fp16", ["trainer.precision", "'32-true', '64-true', 'bf16-mixed'"]),
    "kernels without a GPU": ("model.init_args.compute.kernels", "liger", ["GPU", "'compiled'"]),
    "logger class": ("trainer.logger", {"class_path": "TensorBordLogger"}, ["TensorBoardLogger?"]),
    "logger without a login": ("trainer.logger", {"class_path": "WandbLogger"}, ["trainer.logger", "wandb login"]),
    "logger package": (
        "trainer.logger",
        {"class_path": "CometLogger"},
        ["CometLogger", "comet-ml", "pip install"],
    ),
    "metric": (
        "trainer.callbacks",
        [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/sucess"}}],
        ["'val/sucess'", "trainer.callbacks[0].init_args.monitor", "val/success?"],
    ),
    "metric of a checkpoint": (
        "trainer.callbacks",
        [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/sucess"}}],
        ["trainer.callbacks[0].init_args.monitor", "val/success?"],
    ),
    "validation inside an iteration": (
        "trainer.val_check_interval",
        0.5,
        ["trainer.val_check_interval", "data.init_args.validation.every"],
    ),
    "overfitting": ("trainer.overfit_batches", 1, ["trainer.overfit_batches", "mini_batch_turns"]),
    "averaging": (
        "trainer.callbacks",
        [{"class_path": "StochasticWeightAveraging", "init_args": {"swa_lrs": 1e-3}}],
        ["StochasticWeightAveraging", "trainer.callbacks", "model.init_args.optim.schedule"],
    ),
    "nothing else": ("trainer.barebones", True, ["trainer.barebones"]),
    "shape of a schedule": (
        "model.init_args.optim.schedule",
        {"actor": {"shape": "cosin"}},
        ["optim.schedule", "cosine"],
    ),
    "schedule of no group": (
        "model.init_args.optim.schedule",
        {"shape": "cosine"},
        ["model.init_args.optim.schedule", "shape", "actor, critic"],
    ),
    "schedule as a word": (
        "model.init_args.optim.schedule",
        {"actor": "cosine"},
        ["optim.schedule.actor takes keys of its own, got 'cosine'"],
    ),
    "schedule of warm-up alone": (
        "model.init_args.optim.schedule",
        {"critic": {"shape": "linear", "warmup_steps": 9, "steps": 9}},
        ["model.init_args.optim.schedule", "warmup_steps 9"],
    ),
    "scheduler of Lightning": ("lr_scheduler", {"class_path": "StepLR"}, ["'lr_scheduler'", "optim.schedule"]),
    "negative rate": ("model.init_args.optim.lr_actor", -1e-5, ["model.init_args.optim.lr_actor", "-1e-05"]),
    "negative temperature": ("data.init_args.validation", {"temperature": -1.0}, ["validation.temperature", "-1.0"]),
    "mode of a callback": (
        "trainer.callbacks",
        [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/success", "mode": "maximum"}}],
        ["init_args.mode", "maximum", "max"],
    ),
    "no tokens": (
        "model.init_args.compute",
        {"max_tokens_per_micro_batch": 0},
        ["model.init_args.compute.max_tokens_per_micro_batch", "0"],
    ),
    "environment without a key": (
        "data.init_args.env",
        "agentrl_envs:Bandit-v0",
        ["data.init_args.env", "{id: agentrl_envs:Bandit-v0}"],
    ),
    "validation without a key": ("data.init_args.validation", 32, ["data.init_args.validation", "{episodes: 32}"]),
    "dot for a colon": ("data.init_args.env.id", "agentrl_envs.Bandit-v0", ["mean agentrl_envs:Bandit-v0?"]),
    "no checkpoint yet": ("ckpt_path", "last", ["ckpt_path"]),
    "no best checkpoint": ("ckpt_path", "best", ["ckpt_path", "monitor"]),
    "folder that cannot be made": ("trainer.default_root_dir", "/proc/none/run", ["/proc/none/run"]),
    "folder by a variable": ("trainer.default_root_dir", "$HOME/run", ["trainer.default_root_dir", "$HOME/run"]),
    "folder elsewhere": ("trainer.default_root_dir", "s3://mine/run", ["trainer.default_root_dir", "s3://mine/run"]),
    "checkpoint": ("ckpt_path", "nowhere.ckpt", ["nowhere.ckpt"]),
    "no checkpoint": ("ckpt_path", "given.yaml", ["given.yaml'", "agentrl fit"]),
    "key without a value": ("data.init_args.turns_per_env", None, ["turns_per_env has no value", "it is 8 then"]),
    "setting without a value": ("model.init_args.optim", {"lr_actor": None}, ["optim.lr_actor", "has no value"]),
    "weight without a value": ("model.init_args.entropy_bonus", None, ["entropy_bonus has no value"]),
    "trainer without keys": ("trainer", None, ["trainer has no keys"]),
    "no clip": ("model.init_args.value_clip", 0, ["model.init_args.value_clip", "above 0"]),
    "empty checkpoint": ("ckpt_path", "", ["ckpt_path is empty"]),
    "file for a folder": ("trainer.default_root_dir", "given.yaml/run", ["given.yaml/run"]),
}


def test_what_a_command_makes_itself_is_not_offered_for_configs() -> None:
    """Whether or not the command has been imported."""
    assert issubclass(Person, Engine)
    assert "VLLMEngine" in class_names([Engine])
    assert "Person" not in class_names([Engine])


def again(*case: Any) -> Any:
    """Mark a case of which `make test` has another one of the same kind."""
    return pytest.param(*case, marks=pytest.mark.slow)


# The same kind of fault in another place; `make test` has one of each kind.
AGAIN = {
    *("empty top", "data key", "trainer key", "prompt key", "env key", "memory key"),
    *("class of another kind", "nested class", "callback class", "logger class"),
    *("float", "bool", "list for an int", "float for an int", "misspelt choice"),
    *("type in a dataclass", "type in a callback", "type in trainer"),
    *("environment module", "model on the hub", "long prompts", "constructor", "callback constructor"),
    *("top", "no class", "class of a missing module", "checkpoint", "model folder", "last iteration cut"),
    *(
        "overfitting",
        "averaging",
        "nothing else",
        "logger without a login",
        "schedule of no group",
        "schedule of warm-up alone",
    ),
    *("scheduler of Lightning", "no tokens", "validation without a key", "no best checkpoint", "folder elsewhere"),
    "mode of a callback",
    *("weight without a value", "no clip", "trainer without keys"),
    *("shape of a schedule", "negative temperature", "no checkpoint yet", "folder that cannot be made"),
    *("critic class", "no class_path", "nested constructor", "seed"),
    *("mini-batches", "negative rate", "validation inside an iteration", "environment argument"),
    *("accumulation", "limited iterations", "metric of a checkpoint", "kernels without a GPU", "file for a folder"),
}
assert set(WRONG) >= AGAIN


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in AGAIN else ()) for case in WRONG]
)
def test_wrong_input_is_told_in_one_sentence_with_its_line(
    case: str, config: Config, tmp_path: Path, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))  # of "logger without a login"
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    key, value, parts = WRONG[case]
    message = sentence(agentrl(config=changed(config, key, value)))
    for part in parts:
        assert part in message
    lines = [int(number) for number in re.findall(r"given\.yaml, line (\d+)", message)]
    given = (tmp_path / "given.yaml").read_text().splitlines()
    assert lines
    for line in lines:
        assert given[line - 1].strip(" -").split(":")[0] in message  # the line is that of a key that the sentence names


GROUPS = {"groups": {"size": 1, "per_rollout": 4}, "turns_per_env": 8, "mini_batch_turns": 128}  # their defaults
SPLIT = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 2},
}
UNMET: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "groups": ("GRPO", {}, ["GRPO", "data.init_args.groups"]),
    "a group of two": ("GRPO", GROUPS, ["GRPO", "data.init_args.groups.size", "1", "2"]),
    "greedy episodes": ("ReMax", {}, ["ReMax", "data.init_args.groups"]),
    "whole logits": (
        "OptimalTokenBaseline",
        {"trainer.strategy": SPLIT, "trainer.devices": 2},
        ["Σπ²", "trainer.strategy.init_args.tensor_parallel_size"],
    ),
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


@pytest.mark.parametrize(
    "need",
    [pytest.param(need, marks=() if need in ("groups", "whole logits") else pytest.mark.slow) for need in UNMET],
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


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("trainer.strategy", "ddq", "invalid strategy name"),
        ("trainer.strategy", "fsdp", "The strategy `fsdp` requires a GPU"),
        again("trainer.accelerator", "cpuu", "Available names are: "),
        ("trainer.enable_progress_bar", False, "`enable_progress_bar=False` but found `StageProgress`"),
    ],
)
def test_what_the_trainer_refuses_is_told_in_one_sentence(
    key: str, value: str, part: str, config: Config, agentrl: Command
) -> None:
    config = changed(config, "trainer.callbacks", [{"class_path": "StageProgress"}])
    message = sentence(agentrl(config=changed(config, key, value)))
    assert part in message
    # Of fsdp, Lightning names another argument with its value.
    assert (f"(key {key}; " in message) == (value != "fsdp")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.init_args.lr_actr=1"], ["model.init_args.lr_actr", "lr_actor?"]),
        again(["--model.lr_actr=1"], ["lr_actr", "lr_actor?"]),
        again(["--model.init_args.critic.init_args.popat", "0.1"], ["critic.init_args.popat", "popart?"]),
        (["--modle.class_path=PPOAgent"], ["--modle", "--model?"]),
        (["--optimizer", "AdamW"], ["'--optimizer'", "model.init_args.optim"]),
        again(["--lr_scheduler.T_max=3"], ["'--lr_scheduler'", "model.init_args.optim.schedule"]),
        again(["--model.init_args.optim.lr_actor", "-1e-5"], ["optim.lr_actor", "-1e-05", "(command line)"]),
        (["--max_epochs=3"], ["--max_epochs", "--trainer.max_epochs?"]),
        again(["--trainer.max_epoch=3"], ["trainer.max_epoch", "max_epochs?"]),
        (["--model=PPOAgnt"], ["model.class_path", "(key model.class_path; command line)", "PPOAgent?"]),
        again(["--trainer.fast_dev_run=abc"], ["trainer.fast_dev_run", "'abc'", "(command line)"]),
        (["--data.num_envs=many"], ["data.init_args.num_envs", "'many'", "(command line)"]),
        (["trainer.max_epochs=3"], ["--trainer.max_epochs=3?"]),
        again(["configs/quickstart.yaml"], ["--config configs/quickstart.yaml?"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "--config"]),
        again(["--trainer.default_root_dir", ""], ["trainer.default_root_dir is empty", "(command line)"]),
        (["-x"], ["'-x'", "(command line)"]),
        again(["--trainer.max_epochs", ""], ["trainer.max_epochs", "''", "(command line)"]),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(
    arguments: list[str], parts: list[str], config: Config, agentrl: Command
) -> None:
    message = sentence(agentrl(*arguments, config=config))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", [again("StopOnSignals"), again("RunSummary")])
def test_a_callback_that_is_there_twice_is_refused(name: str, config: Config, agentrl: Command) -> None:
    config = changed(config, "trainer.callbacks", [{"class_path": name}] * 2)
    told = sentence(agentrl(config=config))
    assert told.startswith("trainer")
    assert name in told


@pytest.mark.parametrize("callbacks", [[{"TurnLog": {}}], {"TurnLog": {}}])
def test_a_callback_whose_name_is_a_key_is_not_passed_over(callbacks: Any, config: Config, agentrl: Command) -> None:
    told = sentence(agentrl(config=changed(config, "trainer.callbacks", callbacks)))
    assert told.startswith("trainer.callbacks needs a class_path")


def test_a_config_that_can_be_read_once_only_is_refused(config: Config, agentrl: Command, tmp_path: Path) -> None:
    """As `--config <(...)` of a shell gives it."""
    os.mkfifo(tmp_path / "pipe")
    assert "write it to a file" in sentence(agentrl("--config", str(tmp_path / "pipe")))


def test_an_unknown_command_and_a_missing_config_are_told(agentrl: Command) -> None:
    message = sentence(agentrl(command="fti"))
    for part in ("'fti'", "fit?"):
        assert part in message
    message = sentence(agentrl())
    for part in ("data", "model", "--config"):
        assert part in message


@pytest.mark.parametrize(
    ("command", "arguments", "part"),
    [
        ("view", [""], "the argument run is empty"),
        ("view", ["runs", ""], "the argument other is empty"),
        ("audit-critic", ["runs", "--checkpoint", ""], "the option --checkpoint is empty"),
    ],
)
def test_an_empty_argument_stands_for_nothing(command: str, arguments: list[str], part: str, agentrl: Command) -> None:
    """As of a variable that is not set; an empty path would be the working folder."""
    assert part in sentence(agentrl(*arguments, command=command))


@pytest.mark.parametrize(
    ("command", "arguments", "meant"),
    [
        ("fit", ["--conf", "given.yaml"], "--config?"),
        again("validate", ["--configs=given.yaml"], "--config?"),
        ("clone", ["--config", "given.yaml", "--episode", "3"], "--episodes?"),
        again("inspect", ["--conf", "given.yaml", "--episodes", "3"], "--config?"),
        ("check-env", ["agentrl_envs:Bandit-v0", "--second", "3"], "--seconds?"),
        ("play", ["agentrl_envs:Bandit-v0", "--conf", "given.yaml"], "--config?"),
    ],
)
def test_a_misspelt_option_is_told_whatever_else_is_missing(
    command: str, arguments: list[str], meant: str, config: Config, agentrl: Command
) -> None:
    """No beginning of an option stands for it, in no command."""
    Path("given.yaml").write_text(yaml.safe_dump(config))
    message = sentence(agentrl(*arguments, command=command))
    assert message.startswith("there is no option '--")
    assert message.endswith(f"did you mean {meant}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: [a\n b: c: d", ["line 2"]),
        ("trainer:\n\tmax_epochs: 3", ["line 2"]),
        ("", ["trainer, model, data"]),
        (
            "trainer:\n  max_epochs: 3\n  max_epochs: 4\n",
            ["trainer.max_epochs", "(broken.yaml, lines 2 and 3)"],
        ),
    ],
)
def test_a_broken_config_file_is_named(text: str, parts: list[str], tmp_path: Path, agentrl: Command) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    message = sentence(agentrl("--config", "broken.yaml"))
    for part in ["broken.yaml", *parts]:
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
    for part in ("model", "class_path", "(wrong.yaml, line 1)"):
        assert part in message
    assert agentrl("--config", "right.yaml", "--config", "wrong.yaml")[0] == 0


ITEMS_AGAIN = {"key of tasks", "neither", "environment", "scorer", "scorer key"}
WRONG_ITEMS: dict[str, tuple[Any, list[str]]] = {
    "environment key": ({"id": "x", "shar": 2}, ["no key 'shar' in EnvConfig", "envs[1].shar", "mean share?"]),
    "key of tasks": ({"path": "x", "shr": 2}, ["no key 'shr' in TaskSet", "envs[1].shr", "mean share?"]),
    "neither": ({"idd": "x"}, ["no key 'idd' in EnvConfig", "envs[1].idd", "mean id?"]),
    "type": ({"path": "x", "share": "many"}, ["data.init_args.envs.share must be a number, got 'many'"]),
    "text": ("agentrl_envs:Bandit-v0", ["data.init_args.envs takes mappings, as {id: ...} or {path: ...}"]),
    "environment": ({"id": "agentrl_envs:Bandt-v0"}, ["data.init_args.envs[1].id", "mean agentrl_envs:Bandit-v0?"]),
    "scorer": (
        {"path": "x", "scorer": {"class_path": "PatternMtch"}},
        ["data.init_args.envs[1].scorer.class_path", "did you mean PatternMatch?"],
    ),
    "scorer key": (
        {"path": "x", "scorer": {"class_path": "PatternMatch", "init_args": {"patern": "a"}}},
        ["data.init_args.envs[1].scorer.init_args.patern", "did you mean pattern?"],
    ),
    "constructor of a scorer": (
        {"path": "x", "scorer": {"class_path": "PatternMatch", "init_args": {"pattern": "("}}},
        ["is not a regular expression", "data.init_args.envs[1].scorer.init_args.pattern"],
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ITEMS_AGAIN else ()) for case in WRONG_ITEMS]
)
def test_a_wrong_item_of_a_list_of_sources_is_told_with_its_place(case: str, config: Config, agentrl: Command) -> None:
    item, parts = WRONG_ITEMS[case]
    data = config["data"]["init_args"]
    data["envs"] = [data.pop("env"), item]
    message = sentence(agentrl(config=config))
    for part in parts:
        assert part in message
    assert "given.yaml, line" in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--data.init_args.envs.share", "2"], ["--data.init_args.envs.share would change one of several sources"]),
        (["--data.envs.id=x"], ["--data.envs.id would change one of several sources"]),
        (["--data.init_args.envs[1].share=2"], ["envs[1].share would change one of several sources"]),
        (["--data.init_args.env.id", "x"], ["--data.init_args.env.id is about one", "given.yaml, line"]),
        (["--data.env.share=2"], ["--data.env.share is about one", "given.yaml, line"]),
    ],
)
def test_an_option_that_would_fall_on_one_of_several_sources_is_refused(
    arguments: list[str], parts: list[str], config: Config, agentrl: Command
) -> None:
    data = config["data"]["init_args"]
    data["envs"] = [data.pop("env"), {"id": "agentrl_envs:GuessNumber-v0"}]
    message = sentence(agentrl(*arguments, config=config))
    for part in [*parts, "data.init_args.envs"]:
        assert part in message


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
