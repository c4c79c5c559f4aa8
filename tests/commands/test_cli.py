"""The command `agentrl`: wrong input ends in a sentence and exit code 2; runs that start are in test_cli_runs.py."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.agents import actor_critic
from lightning_agentrl.commands import main as commands

Config = dict[str, Any]
Command = Callable[..., tuple[int, str]]  # gives the exit code and standard error


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    return {
        "model": {
            "class_path": "PPOAgent",
            "init_args": {"model": str(tiny_folder), "critic": {"class_path": "SharedCritic"}},
        },
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "env": {"id": "agentrl_envs:Bandit-v0"},
                "num_envs": 4,
                "turns_per_env": 2,
                "mini_batch_turns": 4,
                "memory": {"class_path": "WindowMemory", "init_args": {"turns": 0}},
                "interaction": {"class_path": "TurnInteraction", "init_args": {"max_reply_tokens": 4}},
                "validation": {"episodes": 2},
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "default_root_dir": str(tmp_path),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


@pytest.fixture
def agentrl(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process; gives its exit code and what it wrote to standard error."""
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, config: Config | None = None, command: str = "fit") -> tuple[int, str]:
        given = [command]
        if config is not None:
            (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
            given += ["--config", str(tmp_path / "given.yaml")]
        monkeypatch.setattr(sys, "argv", ["agentrl", *given, *arguments])
        capsys.readouterr()
        code = 0
        try:
            commands.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capsys.readouterr().err

    return run


def sentence(result: tuple[int, str]) -> str:
    """The one sentence of a refused input."""
    code, text = result
    assert code == 2
    assert "Traceback" not in text
    told = [line for line in text.splitlines() if line.startswith("agentrl: ")]
    assert len(told) == 1
    assert text.rstrip().endswith(told[0])
    return told[0].removeprefix("agentrl: ")


def changed(config: Config, key: str, value: Any) -> Config:
    config = copy.deepcopy(config)
    node = config
    *way, last = key.split(".")
    for part in way:
        node = node.setdefault(part, {})
    node[last] = value
    return config


WRONG = {
    "top": ("modle", {"class_path": "PPOAgent"}, ["modle", "did you mean model?"]),
    "empty top": ("modle", {}, ["modle", "did you mean model?"]),
    "trainer key at the top": ("max_epochs", 3, ["max_epochs", "trainer, model, data", "mean trainer.max_epochs?"]),
    "model key": ("model.init_args.lr_actr", 1e-3, ["model.init_args.lr_actr", "PPOAgent", "did you mean lr_actor?"]),
    "data key": ("data.init_args.num_env", 3, ["data.init_args.num_env", "did you mean num_envs?"]),
    "trainer key": ("trainer.max_epoch", 3, ["trainer.max_epoch", "did you mean max_epochs?"]),
    "prompt key": ("data.init_args.prompt", {"thnk": 1}, ["data.init_args.prompt.thnk", "did you mean think?"]),
    "env key": ("data.init_args.env", {"idd": "x"}, ["data.init_args.env.idd", "did you mean id?"]),
    "memory key": (
        "data.init_args.memory",
        {"class_path": "WindowMemory", "init_args": {"turn": 1}},
        ["data.init_args.memory.init_args.turn", "did you mean turns?"],
    ),
    "callback key": (
        "trainer.callbacks",
        [{"class_path": "StageProgress"}, {"class_path": "CriticWarmup", "init_args": {"rollout": 1}}],
        ["trainer.callbacks[1].init_args.rollout;", "CriticWarmup", "did you mean rollouts?"],
    ),
    "agent class": ("model.class_path", "PPOAgnt", ["model.class_path", "PPOAgnt", "did you mean PPOAgent?"]),
    "critic class": (
        "model.init_args.critic",
        {"class_path": "SharedCritik"},
        ["Critic", "model.init_args.critic", "known: SeparateCritic, SharedCritic", "did you mean SharedCritic?"],
    ),
    "class of another kind": (
        "data.init_args.memory",
        {"class_path": "SharedCritic"},
        ["no Memory 'SharedCritic'", "data.init_args.memory", "FullMemory, WindowMemory"],
    ),
    "nested class": (
        "data.init_args.interaction.init_args.parser",
        {"class_path": "TolerantParsr"},
        ["data.init_args.interaction.init_args.parser.class_path", "RawParser", "did you mean TolerantParser?"],
    ),
    "class of a missing module": (
        "data.init_args.memory",
        {"class_path": "my_code.MyMemory"},
        ["my_code.MyMemory", "data.init_args.memory.class_path", "importable"],
    ),
    "callback class": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmp"}],
        ["trainer.callbacks[0].class_path", "RunSummary", "did you mean CriticWarmup?"],
    ),
    "no class_path": ("model", {"model": "demo"}, ["model needs a class_path", "PPOAgent"]),
    "no class": ("data.init_args.memory", 3, ["data.init_args.memory needs a class_path", "WindowMemory"]),
    "int": ("data.init_args.num_envs", "many", ["data.init_args.num_envs must be a whole number, got 'many'"]),
    "float": ("model.init_args.lr_actor", "fast", ["model.init_args.lr_actor must be a number, got 'fast'"]),
    "bool": ("data.init_args.prompt", {"think": "maybe"}, ["prompt.think must be true or false, got 'maybe'"]),
    "list for an int": ("data.init_args.turns_per_env", [1, 2], ["must be a whole number, got '[1, 2]'"]),
    "float for an int": ("data.init_args.num_envs", 4.5, ["must be a whole number, got '4.5'"]),
    "choice": ("model.init_args.kl_kind", "k9", ["model.init_args.kl_kind must be one of", "'k3'", "'k9'"]),
    "misspelt choice": ("model.init_args.kl_kind", "K3", ["'k1'", "got 'K3'", "did you mean k3?"]),
    "type in a dataclass": (
        "data.init_args.validation.episodes",
        "all",
        ["validation.episodes must be", "'all'"],
    ),
    "type in a callback": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmup", "init_args": {"rollouts": "many"}}],
        ["trainer.callbacks.init_args.rollouts must be a whole number, got 'many'"],
    ),
    "type in trainer": ("trainer.max_epochs", "many", ["trainer.max_epochs must be a whole number, got 'many'"]),
    "missing argument": ("model.init_args", {}, ["model.init_args.model", "missing"]),
    "environment": ("data.init_args.env.id", "agentrl_envs:Bandt-v0", ["Bandt-v0", "data.init_args.env.id", "Bandit"]),
    "environment argument": (
        "data.init_args.env.kwargs",
        {"arm": 2},
        ["data.init_args.env.kwargs", "argument 'arm'"],
    ),
    "environment module": ("data.init_args.env.id", "my_games:Chess-v0", ["my_games", "data.init_args.env.id"]),
    "model folder": ("model.init_args.model", "./no/such/folder", ["./no/such/folder", "model.init_args.model"]),
    "model on the hub": ("model.init_args.model", "nobody/nothing", ["nobody/nothing", "model.init_args.model"]),
    "no environments": ("data.init_args.num_envs", 0, ["data.init_args.num_envs must be at least 1, got 0"]),
    "mini-batches": ("data.init_args.mini_batch_turns", 3, ["data.init_args.mini_batch_turns", "8 turns", "of 3"]),
    "long memory": (
        "data.init_args.memory.init_args.turns",
        200,
        ["WindowMemory", "200 turns", "data.init_args.memory", "data.init_args.prompt.max_prompt_tokens"],
    ),
    "long prompts": (
        "data.init_args.prompt",
        {"max_prompt_tokens": 2048},
        ["context of 2048 tokens", "data.init_args.prompt.max_prompt_tokens"],
    ),
    "constructor": ("model.init_args.temperature", 0.0, ["temperature must be above 0", "model.init_args"]),
    "nested constructor": (
        "data.init_args.memory.init_args.turns",
        -1,
        ["turns must be at least 0, got -1", "data.init_args.memory.init_args"],
    ),
    "callback constructor": (
        "trainer.callbacks",
        [{"class_path": "CriticWarmup", "init_args": {"rollouts": 3}}],
        ["whole number", "change rollouts or fraction", "trainer.callbacks"],
    ),
    "dataclass constructor": (
        "data.init_args.validation.episodes",
        10**6,
        ["1000000 episodes", "data.init_args.validation.episodes"],
    ),
    "seed": ("seed_everything", -1, ["seed_everything cannot be used", "-1"]),
    "clipping": (
        "trainer.gradient_clip_val",
        1.0,
        ["trainer.gradient_clip_val", "init_args.max_grad_norm_actor"],
    ),
    "accumulation": (
        "trainer.accumulate_grad_batches",
        4,
        ["trainer.accumulate_grad_batches", "data.init_args.mini_batch_turns"],
    ),
    "limited iterations": ("trainer.limit_train_batches", 1, ["trainer.limit_train_batches", "mini_batch_turns"]),
    "last iteration cut": ("trainer.max_steps", 3, ["trainer.max_steps 3", "an iteration of 2 optimizer steps"]),
    "precision": ("trainer.precision", "fp16", ["trainer.precision must be one of '32-true', '64-true', 'bf16-mixed'"]),
    "kernels without a GPU": ("model.init_args.kernels", "liger", ["Liger kernels need a GPU", "'compiled'"]),
    "logger class": ("trainer.logger", {"class_path": "TensorBordLogger"}, ["did you mean TensorBoardLogger?"]),
    "logger package": (
        "trainer.logger",
        {"class_path": "CometLogger"},
        ["CometLogger needs the package comet-ml", "pip install"],
    ),
    "metric": (
        "trainer.callbacks",
        [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/sucess"}}],
        ["no metric 'val/sucess'", "trainer.callbacks[0].init_args.monitor", "did you mean val/success?"],
    ),
    "metric of a checkpoint": (
        "trainer.callbacks",
        [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/sucess"}}],
        ["trainer.callbacks[0].init_args.monitor", "did you mean val/success?"],
    ),
    "checkpoint": ("ckpt_path", "nowhere.ckpt", ["nowhere.ckpt"]),
    "no checkpoint": ("ckpt_path", "given.yaml", ["the checkpoint", "given.yaml' cannot be read", "agentrl fit"]),
    "file for a folder": ("trainer.default_root_dir", "given.yaml/run", ["given.yaml/run", "Not a directory"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_told_in_one_sentence_with_its_line(
    case: str, config: Config, tmp_path: Path, agentrl: Command
) -> None:
    key, value, parts = WRONG[case]
    told = sentence(agentrl(config=changed(config, key, value)))
    for part in parts:
        assert part in told
    lines = [int(number) for number in re.findall(r"given\.yaml, line (\d+)", told)]
    given = (tmp_path / "given.yaml").read_text().splitlines()
    assert lines
    for line in lines:
        assert given[line - 1].strip(" -").split(":")[0] in told  # the line is that of a key that the sentence names


GROUPS = {"groups": {"size": 1, "per_rollout": 4}, "turns_per_env": 8, "mini_batch_turns": 128}  # their defaults
SPLIT = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 2},
}
UNMET: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "groups": ("GRPO", {}, ["GRPO needs several episodes from each start state", "data.init_args.groups"]),
    "a group of two": ("GRPO", GROUPS, ["GRPO compares", "data.init_args.groups.size is 1; give at least 2"]),
    "greedy episodes": ("ReMax", {}, ["ReMax needs a greedy episode from each start state", "data.init_args.groups"]),
    "whole logits": (
        "OptimalTokenBaseline",
        {"trainer.strategy": SPLIT, "trainer.devices": 2},
        ["would split the vocabulary, and Σπ² needs whole logits", "trainer.strategy.init_args.tensor_parallel_size"],
    ),
    "scores from 0": (
        "MaxRL",
        GROUPS | {"groups": {"size": 2, "per_rollout": 4}},
        ["MaxRL needs scores of at least 0; set model.init_args.kl_in_reward and data.init_args.interaction.init_args"],
    ),
    "groups of a mean": (
        "GAE",
        {"model.init_args.loss_aggregation": "prompt-mean"},
        ["prompt-mean is a mean over groups", "data.init_args.groups", "model.init_args.loss_aggregation"],
    ),
    "groups of a filter": (
        "GAE",
        {"model.init_args.group_filter": {"class_path": "DropEqualScores"}},
        ["DropEqualScores chooses among groups", "data.init_args.groups", "model.init_args.group_filter"],
    ),
}


@pytest.mark.parametrize("need", UNMET)
def test_what_an_estimator_needs_and_cannot_get_is_told_before_a_model_is_loaded(
    need: str, config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_critic, "load_causal_lm", None)
    advantage, changes, parts = UNMET[need]
    given = changed(config, "model.init_args.advantage", {"class_path": advantage})
    for key, value in changes.items():
        given = changed(given, key if "." in key else f"data.init_args.{key}", value)
    told = sentence(agentrl(config=given))
    for part in parts:
        assert part in told


def test_an_agent_that_gives_an_estimator_no_values_is_told(
    config: Config, agentrl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPOAgent adds a critic where one is needed; an agent of your own may not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_critic.py").write_text(
        "from lightning_agentrl.advantages import GAE\n"
        "from lightning_agentrl.agents import Agent\n\n\n"
        "class Bare(Agent):\n"
        "    def __init__(self, model: str):\n"
        "        super().__init__(model, critic=None, advantage=GAE(), needs_reference=False)\n\n"
        "    def policy_loss(self, batch, scores):\n"
        "        return -batch.advantages * scores.logps\n\n"
        "    def value_loss(self, batch, values):\n"
        "        return values\n"
    )
    given = changed(config, "model", {"class_path": "no_critic.Bare", "init_args": {"model": "demo"}})
    told = sentence(agentrl(config=given))
    assert "GAE needs values, so a critic must be given: set model.init_args.critic" in told


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("trainer.strategy", "ddq", "invalid strategy name"),
        ("trainer.strategy", "fsdp", "The strategy `fsdp` requires a GPU"),
        ("trainer.accelerator", "cpuu", "Available names are: "),
        ("trainer.enable_progress_bar", False, "`enable_progress_bar=False` but found `StageProgress`"),
    ],
)
def test_what_the_trainer_refuses_is_told_in_one_sentence(
    key: str, value: str, part: str, config: Config, agentrl: Command
) -> None:
    config = changed(config, "trainer.callbacks", [{"class_path": "StageProgress"}])
    told = sentence(agentrl(config=changed(config, key, value)))
    assert part in told
    assert (f"(key {key}; " in told) == (
        value != "fsdp"
    )  # of that one, Lightning names another argument with its value


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.init_args.lr_actr=1"], ["model.init_args.lr_actr", "did you mean lr_actor?"]),
        (["--model.lr_actr=1"], ["lr_actr", "did you mean lr_actor?"]),
        (["--model.init_args.critic.init_args.detch", "true"], ["critic.init_args.detch", "did you mean detach?"]),
        (["--modle.class_path=PPOAgent"], ["--modle", "did you mean --model?"]),
        (["--max_epochs=3"], ["--max_epochs", "did you mean --trainer.max_epochs?"]),
        (["--trainer.max_epoch=3"], ["trainer.max_epoch", "did you mean max_epochs?"]),
        (["--model=PPOAgnt"], ["model.class_path", "(key model.class_path; command line)", "did you mean PPOAgent?"]),
        (["--trainer.fast_dev_run=abc"], ["trainer.fast_dev_run must be", "'abc'", "(command line)"]),
        (["--data.num_envs=many"], ["data.init_args.num_envs must be", "'many'", "(command line)"]),
        (["trainer.max_epochs=3"], ["did you mean --trainer.max_epochs=3?"]),
        (["configs/quickstart.yaml"], ["did you mean --config configs/quickstart.yaml?"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "does not exist", "--config"]),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(
    arguments: list[str], parts: list[str], config: Config, agentrl: Command
) -> None:
    told = sentence(agentrl(*arguments, config=config))
    for part in parts:
        assert part in told


def test_an_unknown_command_and_a_missing_config_are_told(agentrl: Command) -> None:
    told = sentence(agentrl(command="fti"))
    assert told.startswith("there is no command 'fti'; known: fit, validate")
    assert told.endswith("did you mean fit?")
    assert "the keys data and model are missing; give a config file with --config" in sentence(agentrl())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: [a\n b: c: d", ["not valid YAML", "line 2"]),
        ("trainer:\n\tmax_epochs: 3", ["not valid YAML", "line 2"]),
        ("", ["holds no keys", "trainer, model, data"]),
        (
            "trainer:\n  max_epochs: 3\n  max_epochs: 4\n",
            ["trainer.max_epochs is given twice (broken.yaml, lines 2 and 3)"],
        ),
    ],
)
def test_a_broken_config_file_is_named(text: str, parts: list[str], tmp_path: Path, agentrl: Command) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    told = sentence(agentrl("--config", "broken.yaml"))
    for part in ["broken.yaml", *parts]:
        assert part in told


def test_of_two_config_files_the_one_with_the_fault_is_named(config: Config, tmp_path: Path, agentrl: Command) -> None:
    (tmp_path / "wrong.yaml").write_text("model:\n  class_path: PPOAgent\n  init_args:\n    lr_actr: 1\n")
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(config))
    for files in (["wrong.yaml", "right.yaml"], ["right.yaml", "wrong.yaml"]):
        told = sentence(agentrl("--config", files[0], "--config", files[1]))
        assert "(key model.init_args.lr_actr; wrong.yaml, line 4)" in told
    (tmp_path / "wrong.yaml").write_text("model:\n  init_args:\n    lr_actor: 1\n")
    assert "model needs a class_path (and init_args for its arguments) (wrong.yaml, line 1)" in sentence(
        agentrl("--config", "wrong.yaml", "--config", "right.yaml")
    )
    assert agentrl("--config", "right.yaml", "--config", "wrong.yaml")[0] == 0


@pytest.mark.parametrize("number", ["5e-6", "'1e-5'"])
def test_numbers_that_yaml_reads_as_text_are_numbers(
    number: str, config: Config, tmp_path: Path, agentrl: Command
) -> None:
    (tmp_path / "more.yaml").write_text(f"model: {{init_args: {{lr_actor: {number}}}}}\n")
    assert agentrl("--config", "more.yaml", config=config)[0] == 0


def test_the_checkpoint_of_another_model_is_told(config: Config, tmp_path: Path, agentrl: Command) -> None:
    saving = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(tmp_path), "filename": "here"}}
    config = changed(config, "trainer.callbacks", [saving])
    assert agentrl(config=config)[0] == 0
    config = changed(changed(config, "ckpt_path", str(tmp_path / "here.ckpt")), "trainer.max_epochs", 2)
    config = changed(config, "model.init_args.critic", {"class_path": "SeparateCritic"})
    told = sentence(agentrl(config=config))
    for part in ("here.ckpt' is of another model: it lacks", "critic.backbone", "model.init_args.critic", "line 1"):
        assert part in told


def test_a_model_folder_without_a_chat_template_is_told_before_the_weights_are_read(
    tiny_folder: Path, tmp_path: Path, config: Config, agentrl: Command
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):  # no weights at all
        (tmp_path / name).write_text((tiny_folder / name).read_text())
    told = sentence(agentrl(config=changed(config, "model.init_args.model", str(tmp_path))))
    assert "no chat template" in told
    assert "chat_template.jinja" in told


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("agentrl")
    done = subprocess.run([command, "fit", "--config", "nowhere.yaml"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("agentrl: the file '")
    assert done.stderr.endswith("nowhere.yaml' does not exist (argument --config)\n")
