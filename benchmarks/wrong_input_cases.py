"""The cases of `wrong_inputs.py`: what is changed in a small config that works, and what the answer must say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.cli import small_config


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Args:
        given: its name in the table.
        changes: dotted keys of the config and their values; None removes a key.
        arguments: further arguments on the command line.
        configs: the files given with --config; `given.yaml` is the config.
        files: further files by name; `{folder}` in them stands for the folder with models and checkpoints.
        command: the subcommand.
        says: what the answer must hold.
        ends: "sentence", or "traceback" for errors of a user's own code.
        code: the exit code.
        unprivileged: run without the rights of the superuser.
        environ: environment variables.
    """

    given: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    configs: Sequence[str] = ("given.yaml",)
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = "fit"
    says: Sequence[str] = ()
    ends: Literal["sentence", "traceback", "run"] = "sentence"
    code: int = 2
    unprivileged: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


CONFIG = small_config("{folder}/llama") | {"seed_everything": 0}
CONFIG["model"]["init_args"]["kl"] = {"reward": 0.0}
CONFIG["data"]["init_args"]["prompt"] = {"max_prompt_tokens": 512}

_ENV = "data.init_args.env"
_LINE = "given.yaml, line "
_WARMUP = {"class_path": "CriticWarmup", "init_args": {"rollouts": 2, "rounds": 2, "fraction": 0.5}}


def callbacks(*items: Mapping[str, Any]) -> dict[str, Any]:
    return {"trainer.callbacks": [{"class_path": "StageProgress"}, *items]}


def shown(model: str = "{folder}/sees", env: str = "my_games:Shows-v0", **arguments: Any) -> dict[str, Any]:
    """Return the changes to an environment with a picture, or messages, and a model."""
    return {"model.init_args.model": model, _ENV: {"id": env, "kwargs": arguments}}


CASES: tuple[Case, ...] = (
    # Names
    Case("command `fti`", command="fti", says=["did you mean fit?"]),
    Case("no command", command="--config", arguments=["given.yaml"], configs=(), says=["agentrl fit --config"]),
    Case("no config", configs=(), says=["data and model are missing", "--config"]),
    Case("key `modle` at the top", {"modle": {"class_path": "PPOAgent"}}, says=["given.yaml, line", "mean model?"]),
    Case("key `max_epochs` at the top", {"max_epochs": 3}, says=[_LINE, "did you mean trainer.max_epochs?"]),
    Case(
        "key `trainer.max_epochs` at the top",
        files={"more.yaml": "trainer.max_epochs: 3\n"},
        configs=["more.yaml"],
        says=["more.yaml, line 1", "did you mean trainer: {max_epochs: ...}?"],
    ),
    Case("key `lr_actr` of the agent", {"model.init_args.lr_actr": 1e-3}, says=[_LINE, "mean optim.lr_actor?"]),
    Case("key `num_env` of the data", {"data.init_args.num_env": 4}, says=[_LINE, "did you mean num_envs?"]),
    Case("key `thnk` of the prompt", {"data.init_args.prompt.thnk": True}, says=[_LINE, "did you mean think?"]),
    Case("key `idd` of the environment", {_ENV + ".idd": "x"}, says=[_LINE, "did you mean id?"]),
    Case("key `max_epoch` of the trainer", {"trainer.max_epoch": 3}, says=[_LINE, "did you mean max_epochs?"]),
    Case(
        "`--model.lr_actr` on the command line",
        arguments=["--model.lr_actr=1"],
        says=["command line", "did you mean optim.lr_actor?"],
    ),
    Case(
        "`--trainer.max_epoch` on the command line",
        arguments=["--trainer.max_epoch=1"],
        says=["command line", "did you mean max_epochs?"],
    ),
    Case(
        "`--max_epochs` on the command line", arguments=["--max_epochs=1"], says=["did you mean --trainer.max_epochs?"]
    ),
    Case("a file without --config", arguments=["given.yaml"], configs=(), says=["did you mean --config given.yaml?"]),
    Case(
        "`key=value` without dashes", arguments=["trainer.max_epochs=1"], says=["did you mean --trainer.max_epochs=1?"]
    ),
    Case("class `PPOAgnt`", {"model.class_path": "PPOAgnt"}, says=[_LINE, "did you mean PPOAgent?"]),
    Case(
        "class `SharedCritik`",
        {"model.init_args.critic.class_path": "SharedCritik"},
        says=[_LINE, "did you mean SharedCritic?"],
    ),
    Case(
        "a class of another kind",
        {"data.init_args.memory": {"class_path": "SharedCritic"}},
        says=["no Memory 'SharedCritic'", _LINE, "WindowMemory"],
    ),
    Case(
        "a class that cannot be imported",
        {"data.init_args.memory": {"class_path": "my_code.MyMemory"}},
        says=["no module 'my_code'", _LINE, "importable"],
    ),
    Case(
        "callback `CriticWarmp`",
        callbacks({"class_path": "CriticWarmp"}),
        says=["trainer.callbacks[1].class_path", _LINE, "did you mean CriticWarmup?"],
    ),
    Case(
        "callback key `rollout`",
        callbacks({"class_path": "CriticWarmup", "init_args": {"rollout": 1}}),
        says=["trainer.callbacks[1].init_args.rollout", _LINE, "did you mean rollouts?"],
    ),
    Case(
        "callback with a wrong type",
        callbacks({"class_path": "CriticWarmup", "init_args": {"rollouts": "x"}}),
        says=[_LINE, "must be a whole number, got 'x'"],
    ),
    Case(
        "two callbacks, one wrong",
        callbacks(_WARMUP, {"class_path": "EarlyStopping", "init_args": {"monitr": "x"}}),
        says=["trainer.callbacks[2].init_args.monitr", _LINE, "did you mean monitor?"],
    ),
    Case(
        "environment `Bandt-v0`",
        {_ENV + ".id": "agentrl_envs:Bandt-v0"},
        says=[_LINE, "did you mean agentrl_envs:Bandit-v0?"],
    ),
    Case("environment of a missing module", {_ENV + ".id": "my_gmes:Chess-v0"}, says=["no module 'my_gmes'", _LINE]),
    Case(
        "environment id without its module",
        {_ENV + ".id": "Bandit-v0"},
        says=[_LINE, "did you mean agentrl_envs:Bandit-v0?"],
    ),
    Case(
        "environment argument `arm`",
        {_ENV + ".kwargs": {"arm": 2}},
        says=["data.init_args.env.kwargs.arm", _LINE, "did you mean arms?"],
    ),
    Case(
        "environment argument of a user's class",
        {_ENV: {"id": "my_games:Base-v0", "kwargs": {"colur": "blue"}}},
        says=[_LINE, "did you mean colour?"],
    ),
    Case("environment argument out of range", {_ENV + ".kwargs": {"arms": 9}}, says=[_LINE, "2 to 3 arms, not 9"]),
    Case(
        "a key of an earlier version",
        {"data.init_args.other_envs": [{"id": "agentrl_envs:Bandit-v0"}]},
        says=["no key 'other_envs' any more", _LINE, "envs: ["],
    ),
    Case(
        "`env` and `envs`", {"data.init_args.envs": [{"id": "agentrl_envs:Bandit-v0"}]}, says=["one of the two", _LINE]
    ),
    Case(
        "a wrong key in a list of sources",
        {_ENV: None, "data.init_args.envs": [{"id": "agentrl_envs:Bandit-v0"}, {"path": "x", "shr": 1}]},
        says=["data.init_args.envs[1].shr", _LINE, "did you mean share?"],
    ),
    Case(
        "an option for one of several sources",
        {_ENV: None, "data.init_args.envs": [{"id": "agentrl_envs:Bandit-v0"}, {"id": "agentrl_envs:Bandit-v0"}]},
        arguments=["--data.init_args.envs.share=2"],
        says=["would change one of several sources"],
    ),
    # Values
    Case("text for an int", {"data.init_args.num_envs": "many"}, says=[_LINE, "a whole number, got 'many'"]),
    Case(
        "text for an int on the command line",
        arguments=["--data.init_args.num_envs=many"],
        says=["a whole number, got 'many'", "(command line)"],
    ),
    Case("text for a float", {"model.init_args.optim.lr_actor": "fast"}, says=[_LINE, "must be a number, got 'fast'"]),
    Case("text for a bool", {"data.init_args.prompt.think": "maybe"}, says=[_LINE, "must be true or false"]),
    Case("a number for a choice", {"model.init_args.kl.reward_kind": 3}, says=[_LINE, "'k1'", "got '3'"]),
    Case("a list for an int", {"data.init_args.turns_per_env": [1, 2]}, says=[_LINE, "a whole number"]),
    Case("a float for an int", {"data.init_args.num_envs": 4.5}, says=[_LINE, "a whole number, got '4.5'"]),
    Case(
        "`5e-6`, a text in YAML 1.1",
        files={"more.yaml": "model: {init_args: {optim: {lr_actor: 5e-6}}}"},
        configs=["given.yaml", "more.yaml"],
        ends="run",
        code=0,
    ),
    Case("a quoted number", {"model.init_args.optim.lr_actor": "1e-5"}, ends="run", code=0),
    Case("no model", {"model": None}, says=["the key model is missing"]),
    Case("no data", {"data": None}, says=["the key data is missing"]),
    Case(
        "an agent without its model",
        {"model.init_args.model": None},
        says=["model.init_args.model of PPOAgent is missing", _LINE],
    ),
    Case("no environment", {"data.init_args.env": None}, says=["there is nothing to play", "data.init_args.env"]),
    Case("model without class_path", {"model": {"model": "{folder}/llama"}}, says=["needs a class_path", _LINE]),
    Case("memory: 3", {"data.init_args.memory": 3}, says=["needs a class_path", _LINE, "WindowMemory"]),
    Case("num_envs: 0", {"data.init_args.num_envs": 0}, says=["must be at least 1, got 0", _LINE]),
    Case("mini-batches that do not divide", {"data.init_args.mini_batch_turns": 3}, says=["do not divide", _LINE]),
    Case("temperature 0", {"model.init_args.temperature": 0.0}, says=["temperature must be above 0", _LINE]),
    Case(
        "a misspelt place in the system text",
        {"data.init_args.prompt.system": "You must {mision}."},
        says=["must be one of {mission}, {actions}, {tips}", _LINE],
    ),
    Case(
        "a place that the environment does not fill",
        {"data.init_args.prompt.system": "Try this: {tips}"},
        says=["attribute `tips`", _LINE],
    ),
    Case("prompts over the context", {"data.init_args.prompt.max_prompt_tokens": 2048}, says=["of 2048", _LINE]),
    Case("a memory too long for the prompt", {"data.init_args.memory.init_args.turns": 200}, says=["200 turns", _LINE]),
    Case(
        "a prompt limit below the first prompt",
        {"data.init_args.prompt.max_prompt_tokens": 8},
        says=["limit of 8", "data.init_args.prompt.max_prompt_tokens", _LINE],
    ),
    Case(
        "warm-up of no whole iterations",
        callbacks({"class_path": "CriticWarmup", "init_args": {"rollouts": 3}}),
        says=["whole number", "trainer.callbacks[1].init_args", _LINE],
    ),
    Case("warm-up longer than max_epochs", callbacks(_WARMUP), ends="run", code=0, says=["warm-up takes 2 iterations"]),
    Case("max_epochs missing", {"trainer.max_epochs": None}, says=["trainer.max_epochs is missing", _LINE]),
    Case("max_steps inside an iteration", {"trainer.max_steps": 3}, says=["inside an iteration", _LINE]),
    Case("precision 16-mixed", {"trainer.precision": "16-mixed"}, says=["not supported", "bf16-mixed", _LINE]),
    Case("precision fp16", {"trainer.precision": "fp16"}, says=["bf16-mixed", "got 'fp16'", _LINE]),
    Case("strategy ddq", {"trainer.strategy": "ddq"}, says=["strategy='ddq'"]),
    Case("strategy fsdp", {"trainer.strategy": "fsdp"}, says=["fsdp"]),
    Case(
        "ddp with 3 processes for 4 environments",
        {"trainer.strategy": "ddp", "trainer.devices": 3},
        says=["shared evenly by 3 processes", _LINE],
    ),
    Case("gradient_clip_val", {"trainer.gradient_clip_val": 1.0}, says=["max_grad_norm_actor", _LINE]),
    Case("accumulate_grad_batches", {"trainer.accumulate_grad_batches": 4}, says=["mini_batch_turns", _LINE]),
    Case("limit_train_batches", {"trainer.limit_train_batches": 1}, says=["would drop mini-batches", _LINE]),
    Case("seed_everything: -1", {"seed_everything": -1}, says=["seed_everything", _LINE]),
    Case("devices: 3 on a CPU", {"trainer.devices": 3}, says=["shared evenly by 3 processes", "trainer.devices"]),
    Case(
        "accelerator cuda without a GPU",
        {"trainer.accelerator": "cuda"},
        environ={"CUDA_VISIBLE_DEVICES": ""},
        says=["accelerator"],
    ),
    Case("accelerator `cpuu`", {"trainer.accelerator": "cpuu"}, says=["accelerator='cpuu'"]),
    Case(
        "monitor of a metric that is not logged",
        callbacks({"class_path": "EarlyStopping", "init_args": {"monitor": "val/sucess"}}),
        says=["val/sucess", "did you mean val/success?", _LINE],
    ),
    Case(
        "checkpoints inside an iteration",
        callbacks({"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1}}),
        says=["inside an iteration", "every_n_epochs"],
    ),
    # Files
    Case("config file missing", configs=["nowhere.yaml"], says=["'nowhere.yaml' does not exist"]),
    Case("a folder as config", configs=["."], says=["'.' cannot be read"]),
    Case(
        "a config that may not be read",
        configs=["{folder}/secret.yaml"],
        unprivileged=True,
        says=["secret.yaml' cannot be read: Permission denied"],
    ),
    Case(
        "broken YAML",
        files={"broken.yaml": "model: [a\n b: c: d\n"},
        configs=["broken.yaml"],
        says=["not valid YAML", "broken.yaml, line 2"],
    ),
    Case(
        "a tab in YAML",
        files={"tab.yaml": "trainer:\n\tmax_epochs: 3\n"},
        configs=["tab.yaml"],
        says=["tab.yaml, line 2", "not with tabs"],
    ),
    Case("an empty file", files={"empty.yaml": ""}, configs=["empty.yaml"], says=["'empty.yaml' holds no keys"]),
    Case("a list at the top", files={"list.yaml": "- model\n- data\n"}, configs=["list.yaml"], says=["no keys"]),
    Case(
        "a key given twice",
        files={"twice.yaml": "trainer:\n  max_epochs: 3\n  devices: 1\n  max_epochs: 4\n"},
        configs=["given.yaml", "twice.yaml"],
        says=["trainer.max_epochs is given twice (twice.yaml, lines 2 and 4)"],
    ),
    Case(
        "two configs, a wrong key in the first",
        files={"first.yaml": "model:\n  class_path: PPOAgent\n  init_args:\n    lr_actr: 1\n"},
        configs=["first.yaml", "given.yaml"],
        says=["first.yaml, line 4"],
    ),
    Case(
        "two configs, no class in the first",
        files={"first.yaml": "model:\n  init_args:\n    optim: {lr_actor: 1}\n"},
        configs=["first.yaml", "given.yaml"],
        says=["model needs a class_path", "first.yaml, line 1"],
    ),
    Case(
        "two configs, a wrong value in the second",
        files={"more.yaml": "data:\n  init_args:\n    num_envs: many\n"},
        configs=["given.yaml", "more.yaml"],
        says=["more.yaml, line 3"],
    ),
    Case(
        "two configs with different classes",
        files={"more.yaml": "data:\n  init_args:\n    memory:\n      class_path: ActionsOnlyMemory\n"},
        configs=["given.yaml", "more.yaml"],
        says=["turns must be at least 1, got 0", "given.yaml, line"],
    ),
    Case("model folder missing", {"model.init_args.model": "./no/such/folder"}, says=["./no/such/folder", _LINE]),
    Case("a hub id without network", {"model.init_args.model": "nobody/nothing"}, says=["nobody/nothing", _LINE]),
    Case("a folder that is no model", {"model.init_args.model": "{folder}"}, says=["no config.json", _LINE]),
    Case("a model without chat template", {"model.init_args.model": "{folder}/no_template"}, says=["no chat template"]),
    Case("checkpoint missing", {"ckpt_path": "nowhere.ckpt"}, says=["no checkpoint 'nowhere.ckpt'", _LINE]),
    Case("a text file as checkpoint", {"ckpt_path": "{folder}/notes.txt"}, says=["cannot be read", _LINE]),
    Case(
        "the checkpoint of another model",
        {"ckpt_path": "{folder}/here.ckpt", "trainer.max_epochs": 2, "model.init_args.model": "{folder}/qwen2"},
        says=["of another model", _LINE],
    ),
    Case(
        "the checkpoint of another environment",
        {"ckpt_path": "{folder}/here.ckpt", "trainer.max_epochs": 2, _ENV + ".id": "agentrl_envs:GuessNumber-v0"},
        says=["checkpoint's environments", _LINE],
    ),
    Case(
        "the checkpoint of another critic",
        {
            "ckpt_path": "{folder}/here.ckpt",
            "trainer.max_epochs": 2,
            "model.init_args.critic.class_path": "SeparateCritic",
        },
        says=["of another model", "critic", _LINE],
    ),
    Case("validate without a model", {"model": None}, command="validate", says=["the key model is missing"]),
    Case(
        "logger `TensorBordLogger`",
        {"trainer.logger": {"class_path": "TensorBordLogger"}},
        says=[_LINE, "did you mean TensorBoardLogger?"],
    ),
    Case(
        "logger of a missing package (MLflow)",
        {"trainer.logger": {"class_path": "MLFlowLogger"}},
        says=["MLFlowLogger needs", "mlflow", _LINE],
    ),
    Case(
        "logger of a missing package (Comet)",
        {"trainer.logger": {"class_path": "CometLogger"}},
        says=["CometLogger needs", "comet-ml", _LINE],
    ),
    Case(
        "a file in place of the run folder",
        {"trainer.default_root_dir": "{folder}/notes.txt", "trainer.logger": True},
        says=["cannot be made", "trainer.default_root_dir", _LINE],
    ),
    Case(
        "a run folder without permission",
        {"trainer.default_root_dir": "{folder}/locked/run", "trainer.logger": True},
        unprivileged=True,
        says=["Permission denied", "trainer.default_root_dir", _LINE],
    ),
    # What users of Lightning reach for
    Case("`--optimizer`", arguments=["--optimizer", "AdamW"], says=["'--optimizer'", "model.init_args.optim"]),
    Case("`--lr_scheduler`", arguments=["--lr_scheduler", "StepLR"], says=["model.init_args.optim.schedule"]),
    Case("a schedule of no group", {"model.init_args.optim.schedule": {"shape": "cosine"}}, says=["actor, critic"]),
    Case(
        "a schedule with steps that are never taken",
        {"model.init_args.optim.schedule": {"actor": {"warmup_steps": 10}}},
        ends="run",
        code=0,
        says=["warmup_steps 10", "2 steps"],
    ),
    Case(
        "a schedule without an end",
        {"model.init_args.optim.schedule": {"actor": {"shape": "cosine"}}, "trainer.max_epochs": -1},
        says=["actor falls until the end", "trainer.max_epochs"],
    ),
    Case(
        "`--lr_actor -1e-5`",
        arguments=["--model.init_args.optim.lr_actor", "-1e-5"],
        says=["optim.lr_actor must be at least 0, got -1e-05", "command line"],
    ),
    Case("`ckpt_path: last` of a new run", {"ckpt_path": "last"}, says=["no checkpoint below", _LINE]),
    Case("`ckpt_path: best` without a metric", {"ckpt_path": "best"}, says=["monitor: val/success", _LINE]),
    Case("val_check_interval", {"trainer.val_check_interval": 0.5}, says=["data.init_args.validation.every", _LINE]),
    Case("check_val_every_n_epoch: 0", {"trainer.check_val_every_n_epoch": 0}, says=["at least 1, got 0", _LINE]),
    Case("overfit_batches", {"trainer.overfit_batches": 1}, says=["trainer.overfit_batches would drop", _LINE]),
    Case("min_steps", {"trainer.min_steps": 3}, says=["trainer.min_epochs", _LINE]),
    Case("barebones", {"trainer.barebones": True}, says=["trainer.barebones", _LINE]),
    Case(
        "StochasticWeightAveraging",
        callbacks({"class_path": "StochasticWeightAveraging", "init_args": {"swa_lrs": 1e-3}}),
        says=["StochasticWeightAveraging changes the optimizer", "trainer.callbacks"],
    ),
    Case("BackboneFinetuning", callbacks({"class_path": "BackboneFinetuning"}), says=["model.init_args.lora"]),
    Case(
        "Weights & Biases without a login",
        {"trainer.logger": {"class_path": "WandbLogger"}},
        says=["wandb login", "trainer.logger"],
        environ={"WANDB_API_KEY": "", "NETRC": "{folder}/no_netrc"},
    ),
    Case("a root that cannot be made", {"trainer.default_root_dir": "/proc/none/run"}, says=["cannot be made", _LINE]),
    Case("a root that is a URL", {"trainer.default_root_dir": "s3://mine/run"}, says=["not a folder of this", _LINE]),
    Case("an environment as text", {_ENV: "agentrl_envs:Bandit-v0"}, says=["mean {id: agentrl_envs:Bandit-v0}?"]),
    Case("validation as a number", {"data.init_args.validation": 32}, says=["mean {episodes: 32}?"]),
    Case(
        "a dot where the colon belongs",
        {_ENV + ".id": "agentrl_envs.Bandit-v0"},
        says=["mean agentrl_envs:Bandit-v0?", _LINE],
    ),
    Case(
        "a negative temperature of validation",
        {"data.init_args.validation": {"temperature": -1.0}},
        says=["at least 0, got -1.0", "data.init_args.validation.temperature"],
    ),
    # What a newcomer types
    Case("a shipped config, misspelt", configs=["quickstrat"], says=["did you mean --config quickstart?"]),
    Case("`new` in a folder that is there", command="new", configs=(), arguments=["."], says=["'.'"]),
    Case("`view` of a file", command="view", configs=(), arguments=["given.yaml"], says=["given.yaml"]),
    Case("`view` of three runs", command="view", configs=(), arguments=["a", "b", "c"], says=["'c'"]),
    Case("`view --port` alone", command="view", configs=(), arguments=[".", "--port", "8003"], says=["--serve"]),
    Case("`replay` of no run", command="replay", configs=(), arguments=["."], says=["no chain is in"]),
    Case("`export` of a config", command="export", configs=(), arguments=["given.yaml", "out"], says=["given.yaml"]),
    Case(
        "`play` of a misspelt game",
        command="play",
        configs=(),
        arguments=["agentrl_envs:GuesNumber-v0", "--model", "{folder}/llama"],
        says=["did you mean agentrl_envs:GuessNumber-v0?"],
    ),
    Case("`--dry-run` of validate", command="validate", arguments=["--dry-run"], says=["give --dry-run to fit"]),
    Case(
        "help of a misspelt class", configs=(), arguments=["--model.help", "PPOAgnt"], says=["did you mean PPOAgent?"]
    ),
    Case(
        "an option without its value",
        arguments=["--data.init_args.num_envs"],
        says=["--data.init_args.num_envs has no value"],
    ),
    Case("kl as a number", {"model.init_args.kl": 0.01}, says=["model.init_args.kl", _LINE]),
    Case("critic: true", {"model.init_args.critic": True}, says=["needs a class_path", _LINE]),
    Case("logger: wandb", {"trainer.logger": "wandb"}, says=["trainer.logger", _LINE]),
    Case("max_time: 1 hour", {"trainer.max_time": "1 hour"}, says=["DD:HH:MM:SS", "trainer.max_time", _LINE]),
    Case("profiler `simpel`", {"trainer.profiler": "simpel"}, says=["'simple', 'advanced'", "trainer.profiler", _LINE]),
    Case("devices: 0", {"trainer.devices": 0}, says=["trainer.devices", _LINE]),
    Case("devices: two", {"trainer.devices": "two"}, says=["trainer.devices", _LINE]),
    Case("2.5 of the held-out episodes", {"trainer.limit_val_batches": 2.5}, says=["trainer.limit_val_batches", _LINE]),
    Case("no nodes", {"trainer.num_nodes": 0}, says=["trainer.num_nodes", _LINE]),
    Case("`--config` and nothing behind it", arguments=["--config"], says=["--config has no value"]),
    Case("deepspeed_stage_3", {"trainer.strategy": "deepspeed_stage_3"}, says=["pip install"]),
    Case(
        "LearningRateMonitor without a logger",
        callbacks({"class_path": "LearningRateMonitor"}),
        says=["LearningRateMonitor", "logger"],
    ),
    Case(
        "a checkpoint callback without checkpoints",
        {"trainer.enable_checkpointing": False, **callbacks({"class_path": "ModelCheckpoint"})},
        says=["enable_checkpointing"],
    ),
    Case(
        "EarlyStopping with mode `maximum`",
        callbacks({"class_path": "EarlyStopping", "init_args": {"monitor": "val/success", "mode": "maximum"}}),
        says=["maximum", "max"],
    ),
    Case("TurnLog with every: 0", callbacks({"class_path": "TurnLog", "init_args": {"every": 0}}), says=["every"]),
    Case("seed_everything: random", {"seed_everything": "random"}, says=["seed_everything", _LINE]),
    Case(
        "a schedule of shape `cosin`",
        {"model.init_args.optim.schedule": {"actor": {"shape": "cosin"}}},
        says=["cosine", _LINE],
    ),
    Case("micro-batches of 0 tokens", {"model.init_args.compute.max_tokens_per_micro_batch": 0}, says=["at least 1"]),
    Case("a game of numbers", {_ENV + ".id": "CartPole-v1"}, says=["ndarray"]),
    Case("validation of -1 episodes", {"data.init_args.validation.episodes": -1}, says=["episodes", _LINE]),
    # Environments
    Case("environment without actions", {_ENV + ".id": "my_games:Actionless-v0"}, says=["names no actions"]),
    Case(
        "environment raising in reset",
        {_ENV + ".id": "my_games:BadReset-v0"},
        ends="traceback",
        code=1,
        says=["my_games.py", "the environment raised KeyError: 'level'", "in its reset"],
    ),
    Case(
        "environment raising in step",
        {_ENV + ".id": "my_games:BadStep-v0"},
        ends="traceback",
        code=1,
        says=["my_games.py", "the environment raised IndexError: no such room (environment ", "action 'left'"],
    ),
    Case(
        "environment whose observation is a number",
        {_ENV + ".id": "my_games:Numbers-v0"},
        says=["observations must be text", "in its reset"],
    ),
    Case(
        "environment whose later observation is a number",
        {_ENV + ".id": "my_games:LateNumbers-v0"},
        says=["observations must be text", "action 'left'"],
    ),
    Case(
        "environment whose reset gives no info",
        {_ENV + ".id": "my_games:NoInfo-v0"},
        says=["must give (observation, info)"],
    ),
    Case(
        "environment whose step gives four values",
        {_ENV + ".id": "my_games:FourValues-v0"},
        says=["gave 4 values; it must give (observation, reward, terminated, truncated, info)"],
    ),
    Case("environment whose reward is text", {_ENV + ".id": "my_games:TextReward-v0"}, says=["must be a number"]),
    # Keys without a value, and values that are none
    *(
        Case(f"`{text}` in a second file", configs=("given.yaml", "more.yaml"), files={"more.yaml": text}, says=says)
        for text, says in (
            ("data: {init_args: {turns_per_env: }}", ["turns_per_env has no value", "it is 8 then"]),
            ("model: {init_args: {optim: {lr_actor: }}}", ["optim.lr_actor", "has no value"]),
            ("model: {init_args: {entropy_bonus: }}", ["entropy_bonus has no value"]),
            ("trainer:", ["trainer has no keys"]),
            ("data:", ["data has no keys"]),
        )
    ),
    Case("clip of 0 for values", {"model.init_args.value_clip": 0}, says=["model.init_args.value_clip", "above 0"]),
    Case("`ckpt_path` that is empty", {"ckpt_path": ""}, says=["ckpt_path is empty"]),
    Case(
        "schedule of the actor as a word",
        {"model.init_args.optim": {"schedule": {"actor": "cosine"}}},
        says=["optim.schedule.actor takes keys of its own, got 'cosine'"],
    ),
    Case("environments as 4.0", {"data.init_args.num_envs": 4.0}, says=["num_envs must be a whole number"]),
    # Images and messages
    Case("image for a model that reads text", shown("{folder}/llama"), says=["reads text only", "observation: text"]),
    Case(
        "image for a model that reads text, in a later turn",
        shown("{folder}/llama", later=True),
        says=["reads text only", "observation: text"],
    ),
    Case("image of floats", shown(dtype="float32"), says=["float32 [64, 64, 3]", "must be uint8"]),
    Case("image with four channels", shown(shape=[8, 8, 4]), says=["uint8 [8, 8, 4]", "RGB"]),
    Case("image without pixels", shown(shape=[0, 8, 3]), says=["at least one pixel"]),
    Case("image 201 times as wide as high", shown(shape=[1, 201, 3]), says=["factor of 200, got 1 x 201"]),
    Case("image of 48 million pixels", shown(shape=[6000, 8000, 3]), ends="run", code=0),
    Case("image of one pixel", shown(shape=[1, 1, 3]), ends="run", code=0),
    Case(
        "image beside markers and placeholders",
        shown(text="<|im_end|><|vision_start|><|image_pad|><|im_start|>assistant"),
        ends="run",
        code=0,
    ),
    Case(
        "images, more than a prompt may have",
        shown(count=3) | {"data.init_args.prompt.max_images": 2},
        says=["shows 3 images, over the limit of 2", "data.init_args.prompt.max_images"],
    ),
    Case(
        "images, more tokens than a prompt may have",
        shown(count=3, shape=[256, 256, 3]),
        says=["over the limit of 512", "max_prompt_tokens"],
    ),
    Case(
        "image for a template without images",
        shown("{folder}/sees_without_template"),
        says=["0 placeholders for an image", "model.init_args.model"],
    ),
    Case("image and a tower that is not there", {"model.init_args.train_tower": True}, says=["train_tower"]),
    Case(
        "messages with a system's role", shown(env="my_games:Speaks-v0", role="system"), says=["'system'", "user, tool"]
    ),
    Case(
        "messages of a tool for a template without tools",
        shown("{folder}/no_tools", env="my_games:Speaks-v0", role="tool"),
        says=["leaves out or moves messages of the roles tool"],
    ),
    Case("messages with a number in them", shown(env="my_games:Speaks-v0", content=7), says=["content of message 0"]),
    # What was misnamed or passed over
    Case("`timeout_seconds: 1m`", {f"{_ENV}.timeout_seconds": "1m"}, says=[f"{_ENV}.timeout_seconds must be a number"]),
    Case(
        "callback by its name alone",
        {"trainer.callbacks": {"TurnLog": {}}},
        says=["trainer.callbacks needs a class_path"],
    ),
    Case("item of callbacks by its name", {"trainer.callbacks": [{"TurnLog": {}}]}, says=["{class_path: TurnLog"]),
    Case(
        "list of loggers, one without a folder",
        {
            "trainer.logger": [
                {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
                {"class_path": "TensorBoardLogger"},
            ]
        },
        says=["save_dir of TensorBoardLogger is missing"],
    ),
    Case("model name with a blank", {"model.init_args.model": "my model"}, says=["no model folder 'my model'"]),
    Case("accelerator that is not there", {"trainer.accelerator": "gpu"}, says=["trainer.accelerator"]),
    Case(
        "Timer that ends within an iteration",
        callbacks({"class_path": "Timer", "init_args": {"duration": "00:01:00:00"}}),
        says=["Timer with interval step", "interval: epoch"],
    ),
)
