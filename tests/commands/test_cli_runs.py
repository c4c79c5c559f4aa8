"""A run that the command has started: it works, or ends by memory, an environment, Ctrl-C or a bug."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from lightning_agentrl.agents import PPOAgent, models
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.rollout import RolloutDataModule
from tests.cli import Command, Config, changed, sentence


def test_a_run_works_and_saves_its_config(config: Config, tmp_path: Path, agentrl: Command) -> None:
    code, _ = agentrl(config=config)
    assert code == 0
    assert agentrl(config=config, command="validate")[0] == 0


@pytest.mark.parametrize(
    ("owner", "name", "command", "parts"),
    [
        pytest.param(
            *(TransformersEngine, "_generate_batch", "fit", ["in stage collect", "init_args.max_batch", "num_envs"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TransformersEngine,
            "_generate_batch",
            "validate",
            ["in stage validate", "data.init_args.validation.num_envs"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(PPOAgent, "score", "fit", ["in stage score", "model.init_args.compute.max_tokens_per_micro_batch"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(PPOAgent, "policy_loss", "fit", ["in stage update", "gradient_checkpointing", "SharedCritic"]),
            marks=pytest.mark.slow,
        ),
        (models, "load_causal_lm", "fit", ["in stage load", "smaller model (model.init_args.model)"]),
    ],
)
def test_running_out_of_memory_says_in_which_stage(
    owner: Any,
    name: str,
    command: str,
    parts: list[str],
    config: Config,
    agentrl: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(owner, name, full)
    told = sentence(agentrl(config=config, command=command))
    assert told.startswith("out of memory on the GPU in stage ")
    for part in parts:
        assert part in told


class Labyrinth(gymnasium.Env[str, str]):
    """A user's environment that may be broken."""

    actions = {"left": "go left", "right": "go right"}
    default_action = "left"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.fault == "reset":
            raise KeyError("level")
        if self.fault == "number":
            return 7, {}
        return "a fork in the road" if self.fault == "no info" else ("a fork in the road", {})

    def step(self, action: str) -> Any:
        if self.fault == "step":
            raise IndexError("no such room")
        if self.fault == "four values":
            return "a fork in the road", 0.0, True, {}
        return 7 if self.fault == "later number" else "a fork in the road", 0.0, False, True, {}


gymnasium.register(id="Labyrinth-v0", entry_point=Labyrinth)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        pytest.param("number", ["observations must be text"], marks=pytest.mark.slow),
        ("later number", ["observations must be text", "environment ", "action '"]),
        pytest.param("no info", ["(observation, info)"], marks=pytest.mark.slow),
        ("four values", ["(observation, reward, terminated, truncated, info)", "environment ", "action '"]),
    ],
)
def test_an_environment_with_wrong_answers_is_told(
    fault: str, parts: list[str], config: Config, agentrl: Command
) -> None:
    told = sentence(agentrl(config=changed(config, "data.init_args.env", labyrinth(fault))))
    for part in parts:
        assert part in told


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        pytest.param("reset", "agentrl: the environment raised KeyError: 'level' \\(", marks=pytest.mark.slow),
        ("step", "episodes in a row .* the environment raised IndexError: no such room \\(environment "),
    ],
)
def test_an_error_of_an_environment_shows_its_code_and_where_it_came(
    fault: str, last: str, config: Config, agentrl: Command
) -> None:
    code, text = agentrl(config=changed(config, "data.init_args.env", labyrinth(fault)))
    assert code == 1
    assert "test_cli_runs.py" in text
    assert "trainer.py" not in text  # none of the fifty lines in between
    assert re.search(last, text.splitlines()[-1])


def test_the_command_makes_no_environment_twice(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = Labyrinth.__init__, []

    def counted(self: Labyrinth, fault: str = "") -> None:
        made.append(self)
        make(self, fault)

    monkeypatch.setattr(Labyrinth, "__init__", counted)
    config = changed(config, "data.init_args.env", labyrinth(""))
    assert agentrl(config=config)[0] == 0
    assert len(made) == 4 + 2  # num_envs, and two held-out episodes
    made.clear()
    assert agentrl("--dry-run", config=config)[0] == 0
    assert len(made) == 1


@pytest.mark.slow
def test_a_process_that_ends_is_told_in_one_sentence(config: Config, agentrl: Command) -> None:
    env = {"id": "tests.episodes.small_envs:Walk-v0", "kwargs": {"fault": "exits"}, "worker": "process", "retries": 0}
    code, text = agentrl(config=changed(config, "data.init_args.env", env))
    assert code == 1
    assert "Traceback" not in text
    told = r"agentrl: the environment's process ended in step with exit code 3 \(environment \d+, episode 0 .*"
    assert re.fullmatch(told, text.splitlines()[-1])


def labyrinth(fault: str) -> Config:
    return {"id": "Labyrinth-v0", "kwargs": {"fault": fault}}


def test_bugs_keep_their_traceback(config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RolloutDataModule) -> None:
        raise ValueError("a bug while the agent plays")

    monkeypatch.setattr(RolloutDataModule, "collect", broken)
    with pytest.raises(ValueError, match="a bug while the agent plays"):
        agentrl(config=config)


def test_ctrl_c_ends_with_one_line_and_the_last_checkpoint(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, calls = RolloutDataModule.collect, []

    def interrupted(self: RolloutDataModule) -> Any:
        calls.append(self)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return collect(self)

    monkeypatch.setattr(RolloutDataModule, "collect", interrupted)
    code, text = agentrl(config=changed(config, "trainer.max_epochs", 5))
    assert code == 130
    assert "Traceback" not in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("agentrl: stopped after iteration 2; continue with --ckpt_path ")
    assert Path(last.split("--ckpt_path ")[1]).is_file()
    assert not calls[0].sessions  # threads are ended: one inside torch would abort the process at its exit

    calls.clear()
    config["trainer"]["enable_checkpointing"] = False
    code, text = agentrl(config=changed(config, "trainer.max_epochs", 5))
    assert code == 130
    assert "there is no checkpoint yet" in text


@pytest.mark.slow
def test_ctrl_c_in_an_update_ends_what_is_collected_meanwhile(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, modules = PPOAgent.training_step, []

    def interrupted(self: PPOAgent, batch: Any, batch_idx: int) -> None:
        modules.append(self.datamodule)
        if self.trainer.current_epoch == 2:
            signal.raise_signal(signal.SIGINT)
        step(self, batch, batch_idx)

    monkeypatch.setattr(PPOAgent, "training_step", interrupted)
    config = changed(changed(config, "trainer.max_epochs", 5), "data.init_args.max_staleness", 1)
    code, text = agentrl(config=config)
    assert code == 130
    assert "Traceback" not in text
    assert text.rstrip().splitlines()[-1].startswith("agentrl: stopped after iteration 2; continue with --ckpt_path ")
    assert not modules[0].sessions
