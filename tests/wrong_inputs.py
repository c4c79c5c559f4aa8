"""Mistakes that users make, the command that gets them, and what its answer must say.

`python -m tests.wrong_inputs` runs all of them and writes `docs/results/wrong_inputs.md`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from tests.cli import Config, small_config

PAGE = Path(__file__).parents[1] / "docs" / "results" / "wrong_inputs.md"
TEXT = """\
# Wrong input, and the answer

Look up what a command answers to wrong input. Each row has a mistake and the answer. `python -m tests.wrong_inputs`
writes this page; `tests/commands/test_wrong_inputs.py` checks each answer.

| mistake | answer |
|---|---|
"""
GAMES = """\
import gymnasium
from gymnasium import spaces


class Fork(gymnasium.Env):
    actions = {"left": "go left", "right": "go right"}
    default_action = "left"
    system_prompt = "Choose left or right."
    observation_space = action_space = spaces.Text(100)

    def __init__(self, colour="red"):
        self.colour = colour

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a fork in the road", {}

    def step(self, action):
        return "a fork in the road", 0.0, False, True, {}


class Numbers(Fork):
    def reset(self, *, seed=None, options=None):
        return 7, {}


class FourValues(Fork):
    def step(self, action):
        return "a fork in the road", 0.0, True, {}


class Raising(Fork):
    def step(self, action):
        raise IndexError("no such room")


class Actionless(Fork):
    actions = {}


for made in (Fork, Numbers, FourValues, Raising, Actionless):
    gymnasium.register(f"{made.__name__}-v0", made)
"""


@dataclass(frozen=True)
class Case:
    """A mistake.

    Args:
        given: its name.
        says: parts of the answer.
        changes: dotted keys of a config that works, and their values; None removes a key.
        arguments: further arguments.
        config: whether the config is given.
        command: the subcommand.
        code: the exit code.
        files: further files in the working folder.
    """

    given: str
    says: Sequence[str]
    changes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    config: bool = True
    command: str = "fit"
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)


def one(*callbacks: Mapping[str, Any]) -> dict[str, Any]:
    return {"trainer.callbacks": list(callbacks)}


_ENV = "data.init_args.env"
_LINE = "given.yaml, line "
CASES = (
    # names
    Case("command `fti`", ["did you mean fit?"], command="fti", config=False),
    Case("no config", ["data and model are missing", "--config"], config=False),
    Case("a config that does not exist", ["'nowhere.yaml' does not exist"], arguments=["--config", "nowhere.yaml"]),
    Case("`--config quikstart`", ["mean --config quickstart?"], arguments=["--config", "quikstart"], config=False),
    Case("a config indented by a tab", ["not valid YAML", "more.yaml, line 2"], arguments=["--config", "more.yaml"],
         files={"more.yaml": "trainer:\n\tmax_epochs: 3\n"}),
    Case("a key given twice", ["trainer.max_epochs is given twice", "more.yaml, line 3"],
         arguments=["--config", "more.yaml"], files={"more.yaml": "trainer:\n  max_epochs: 3\n  max_epochs: 4\n"}),
    Case("key `modle`", ["no key 'modle'", _LINE, "mean model?"], {"modle": {"class_path": "PPOAgent"}}),
    Case("key `max_epochs` at the top", [_LINE, "mean trainer.max_epochs?"], {"max_epochs": 3}),
    Case("key `lr_actr` of the agent", ["no key 'lr_actr' in PPOAgent", _LINE, "mean optim.lr_actor?"],
         {"model.init_args.lr_actr": 1e-3}),
    Case("key `num_env`", ["data.init_args.num_env", _LINE, "mean num_envs?"], {"data.init_args.num_env": 4}),
    Case("key `thnk` of the prompt", ["prompt.thnk", _LINE, "mean think?"], {"data.init_args.prompt": {"thnk": 1}}),
    Case("key `max_epoch` of the trainer", ["no key 'max_epoch' in Trainer", _LINE, "mean max_epochs?"],
         {"trainer.max_epoch": 3}),
    Case("`--model.lr_actr=1`", ["command line", "mean optim.lr_actor?"], arguments=["--model.lr_actr=1"]),
    Case("`--max_epochs=1`", ["command line", "mean trainer.max_epochs?"], arguments=["--max_epochs=1"]),
    Case("class `PPOAgnt`", ["no Agent 'PPOAgnt'", _LINE, "mean PPOAgent?"], {"model.class_path": "PPOAgnt"}),
    Case("class `SharedCritik`", ["no Critic", _LINE, "mean SharedCritic?"],
         {"model.init_args.critic.class_path": "SharedCritik"}),
    Case("a class in a module that is not there", ["no module 'my_code'", _LINE, "importable"],
         {"data.init_args.memory": {"class_path": "my_code.MyMemory"}}),
    Case("a class in a module with an error", ["importing my_memory raised NameError"],
         {"data.init_args.memory": {"class_path": "my_memory.Mine"}}, files={"my_memory.py": "class M(Memory): ..."}),
    Case("a value in place of a class", ["data.init_args.memory", "WindowMemory", _LINE], {"data.init_args.memory": 3}),
    Case("callback `CriticWarmp`", ["trainer.callbacks[0].class_path", _LINE, "mean CriticWarmup?"],
         one({"class_path": "CriticWarmp"})),
    Case("key `rollout` of a callback", ["trainer.callbacks[0].init_args.rollout", _LINE, "mean rollouts?"],
         one({"class_path": "CriticWarmup", "init_args": {"rollout": 1}})),
    Case("a callback without class_path", ["trainer.callbacks", "class_path"], one({"TurnLog": {}})),
    Case("a metric that is not logged", ["val/sucess", "val/success"],
         one({"class_path": "EarlyStopping", "init_args": {"monitor": "val/sucess"}})),
    # values
    Case("text for a number", ["must be a whole number, got 'many'", _LINE], {"data.init_args.num_envs": "many"}),
    Case("text for true or false", ["think must be true or false, got 'maybe'", _LINE],
         {"data.init_args.prompt": {"think": "maybe"}}),
    Case("a misspelt choice", ["one of k1, abs, k2, k3", "mean k3?"], {"model.init_args.kl": {"reward_kind": "K3"}}),
    Case("a key without a value", ["turns_per_env has no value", "for its default 8", _LINE],
         {"data.init_args.turns_per_env": None}),
    Case("an environment without its key", ["{id: ...}", _LINE], {_ENV: "agentrl_envs:Bandit-v0"}),
    Case("no model", ["model.init_args.model of PPOAgent is missing", _LINE], {"model.init_args": {}}),
    Case("no number of iterations", ["trainer.max_epochs is missing"], {"trainer.max_epochs": None}),
    Case("temperature 0", ["temperature must be above 0", "model.init_args.temperature", _LINE],
         {"model.init_args.temperature": 0.0}),
    Case("a mini-batch that does not divide the turns", ["mini_batch_turns", "8", "3", _LINE],
         {"data.init_args.mini_batch_turns": 3}),
    Case("prompts longer than the model reads", ["max_prompt_tokens", "2048", _LINE],
         {"data.init_args.prompt": {"max_prompt_tokens": 2048}}),
    Case("an estimator that needs groups", ["GRPO", "data.init_args.groups"],
         {"model.init_args.advantage": {"class_path": "GRPO"}}),
    Case("Lightning's gradient clipping", ["trainer.gradient_clip_val", "optim.max_grad_norm_actor", _LINE],
         {"trainer.gradient_clip_val": 1.0}),
    Case("precision `fp16`", ["trainer.precision", "bf16-mixed", _LINE], {"trainer.precision": "fp16"}),
    Case("a strategy that does not exist", ["trainer", "ddq"], {"trainer.strategy": "ddq"}),
    # environments
    Case("environment `Bandt-v0`", ["Bandt-v0", f"{_ENV}.id", _LINE, "mean agentrl_envs:Bandit-v0?"],
         {f"{_ENV}.id": "agentrl_envs:Bandt-v0"}),
    Case("environment of a module that is not there", ["no module 'my_gmes'", f"{_ENV}.id", _LINE],
         {f"{_ENV}.id": "my_gmes:Chess-v0"}),
    Case("argument `color` of an environment", ["no argument 'color'", _LINE, "mean colour?"],
         {_ENV: {"id": "my_games:Fork-v0", "kwargs": {"color": "red"}}}),
    Case("an environment without actions", ["names no actions"], {f"{_ENV}.id": "my_games:Actionless-v0"}),
    Case("an observation that is a number", ["observations must be text", "in its reset"],
         {f"{_ENV}.id": "my_games:Numbers-v0"}),
    Case("a step that returns four values", ["returned 4 values"], {f"{_ENV}.id": "my_games:FourValues-v0"}),
    Case("an environment that raises", ["my_games.py", "the environment raised IndexError: no such room"],
         {f"{_ENV}.id": "my_games:Raising-v0"}, code=1),
    Case("a secret written out", ["kwargs.api_key' looks like a secret", "${API_KEY}"],
         {_ENV: {"id": "my_games:Fork-v0", "kwargs": {"api_key": "swordfish"}}}),
    # files, models, ports
    Case("a model folder that is not there", ["./no/such/folder", "model.init_args.model", _LINE],
         {"model.init_args.model": "./no/such/folder"}),
    Case("a model on a hub that does not answer", ["nobody/nothing", "model.init_args.model", _LINE],
         {"model.init_args.model": "nobody/nothing"}),
    Case("a checkpoint that is not there", ["no checkpoint 'nowhere.ckpt'", _LINE], {"ckpt_path": "nowhere.ckpt"}),
    Case("`ckpt_path: last` without a checkpoint", ["there is no checkpoint", "ckpt_path"], {"ckpt_path": "last"}),
    Case("a file that is no checkpoint", ["given.yaml'", "cannot be read"], {"ckpt_path": "given.yaml"}),
    Case("a run's folder that cannot be made", ["given.yaml/run"], {"trainer.default_root_dir": "given.yaml/run"}),
    Case("a page of no run", ["nowhere"], command="view", arguments=["nowhere"], config=False),
    Case("a misspelt option", ["no option '--las'", "mean --last?"], command="view", arguments=["x", "--las", "3"],
         config=False),
    Case("a port in use", ["in use", "--port"], command="serve-env",
         arguments=["agentrl_envs:Bandit-v0", "--port", "{port}"], config=False),
    Case("export of no checkpoint", ["no checkpoint file 'nowhere.ckpt'"], command="export",
         arguments=["nowhere.ckpt", "out"], config=False),
)  # fmt: skip


def prepare(case: Case, folder: Path, model: Path, port: int) -> list[str]:
    """Write a case's files into the working folder, and return the command's arguments.

    Args:
        case: the mistake.
        folder: the working folder.
        model: folder of a tiny model.
        port: one that is in use.
    """
    (folder / "my_games.py").write_text(GAMES)
    for name in ("my_games", "my_memory"):  # of an earlier case
        sys.modules.pop(name, None)
    for name in [name for name, made in gymnasium.registry.items() if str(made.entry_point).startswith("<class 'my_g")]:
        del gymnasium.registry[name]
    for name, text in case.files.items():
        (folder / name).write_text(text)
    arguments = [case.command]
    if case.config:
        (folder / "given.yaml").write_text(yaml.safe_dump(_changed(small_config(model), case.changes), sort_keys=False))
        arguments += ["--config", "given.yaml"]
    return arguments + [argument.replace("{port}", str(port)) for argument in case.arguments]


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *way, last = key.split(".")
        node = config
        for part in way:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def answer(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command in this process; return its exit code and standard error."""
    from lightning_agentrl.commands import main as commands

    said = io.StringIO()
    before = sys.argv
    sys.argv, code = ["agentrl", *arguments], 0
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            commands.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return code, said.getvalue()


@contextlib.contextmanager
def taken_port() -> Any:
    """Hold a port, as another program would."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def main() -> None:
    """Write the page."""
    from tests.tiny import tiny_model_folder

    rows = []
    os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    with tempfile.TemporaryDirectory() as base, taken_port() as port:
        model = tiny_model_folder(Path(base) / "model")
        for number, case in enumerate(CASES):
            folder = Path(base) / str(number)
            folder.mkdir()
            os.chdir(folder)
            code, said = answer(prepare(case, folder, model, port))
            lines = [line for line in said.splitlines() if line.startswith("agentrl: ")]
            assert (code, bool(lines)) == (case.code, True), f"{case.given}: {said}"
            shown = lines[-1].removeprefix("agentrl: ").replace(base, "FOLDER").replace(str(port), "PORT")
            rows.append(f"| {case.given} | {shown.replace('|', chr(92) + '|')} |")
    PAGE.write_text(TEXT + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
