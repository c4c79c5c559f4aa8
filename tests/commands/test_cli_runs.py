"""A run that the command has started: it works, or ends by memory, an environment, Ctrl-C or a bug."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import yaml
from lightning.pytorch.loops.fit_loop import _FitLoop

from lightning_agentrl.agents import PPOAgent, models
from lightning_agentrl.callbacks.run_folder import claim, release
from lightning_agentrl.commands.run_config import LookOnce
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.engines.transformers.batch import Batch
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.collector import Collector
from tests.cli import Command, Config, changed, fit, sentence
from tests.disks import mounted


def test_a_run_works_and_saves_its_config_which_a_validation_leaves_as_it_is(
    config: Config, tmp_path: Path, agentrl: Command
) -> None:
    code, _ = agentrl(config=config)
    assert code == 0
    record = (tmp_path / "config.yaml").read_bytes()
    validation = changed(config, "data.init_args.validation.episodes", 3)
    assert agentrl(config=validation, command="validate")[0] == 0
    assert (tmp_path / "config.yaml").read_bytes() == record  # of the run
    (tmp_path / "config.yaml").unlink()
    assert agentrl(config=validation, command="validate")[0] == 0
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["data"]["init_args"]["validation"]["episodes"] == 3


def test_a_run_that_is_refused_leaves_the_config_of_the_run_in_its_folder(
    config: Config, tmp_path: Path, agentrl: Command
) -> None:
    assert agentrl(config=config)[0] == 0
    record = (tmp_path / "config.yaml").read_bytes()
    other = changed(changed(config, "data.init_args.turns_per_env", 4), "trainer.max_epochs", 2)
    assert "turns_per_env" in sentence(agentrl("--ckpt_path", "last", config=other))
    assert (tmp_path / "config.yaml").read_bytes() == record
    claimed = claim(tmp_path)
    assert "another run is writing" in sentence(agentrl(config=other))
    release(claimed)
    assert (tmp_path / "config.yaml").read_bytes() == record
    assert agentrl(config=other)[0] == 0
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["data"]["init_args"]["turns_per_env"] == 4


def test_a_default_that_is_an_enum_can_be_saved(config: Config, agentrl: Command, tmp_path: Path) -> None:
    """As Lightning's Timer has one."""
    timed = [{"class_path": "Timer", "init_args": {"duration": "00:01:00:00"}}]
    given = changed(changed(config, "trainer.callbacks", timed), "trainer.logger", {"class_path": "CSVLogger"})
    given["trainer"]["logger"]["init_args"] = {"save_dir": str(tmp_path)}
    code, printed = agentrl(config=given)
    assert code == 0, printed
    assert any("interval: step" in saved.read_text() for saved in tmp_path.rglob("config.yaml"))


def test_null_on_the_command_line_is_no_text(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = changed(config, "data.init_args.prompt", {"instruction": "Act.", "system": "Play."})
    nulls = ["--data.init_args.prompt.instruction", "null", "--data.init_args.prompt.system=null"]
    fit(given, tmp_path, monkeypatch, *nulls, "--print_config")
    prompt = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["prompt"]
    assert (prompt["instruction"], prompt["system"]) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "command", "parts"),
    [
        pytest.param(
            *(Batch, "_read", "fit", ["in stage collect", "init_args.max_batch", "num_envs"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Batch,
            "_read",
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
    message = sentence(agentrl(config=config, command=command))
    assert message.startswith("out of memory on the GPU in stage ")
    for part in parts:
        assert part in message


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
        return "a fork in the road" if self.fault == "no info" else ("a fork in the road", {})

    def step(self, action: str) -> Any:
        if self.fault == "step":
            raise IndexError("no such room")
        return 7 if self.fault == "later number" else "a fork in the road", 0.0, False, True, {}


gymnasium.register(id="Labyrinth-v0", entry_point=Labyrinth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("later number", ["observations must be text", "environment ", "action '"]),
        pytest.param("no info", ["(observation, info)"], marks=pytest.mark.slow),
    ],
)
def test_an_environment_with_wrong_answers_is_told(
    fault: str, parts: list[str], config: Config, agentrl: Command
) -> None:
    message = sentence(agentrl(config=changed(config, "data.init_args.env", labyrinth(fault))))
    for part in parts:
        assert part in message


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


@pytest.mark.slow
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
    for flag in (["--dry-run"], ["--dry-run", "true"]):
        made.clear()
        assert agentrl(*flag, config=config)[0] == 0
        assert len(made) == 1


@pytest.mark.slow
def test_a_process_that_ends_is_told_in_one_sentence(config: Config, agentrl: Command) -> None:
    env = {"id": "tests.episodes.small_envs:Walk-v0", "kwargs": {"fault": "exits"}, "worker": "process", "retries": 0}
    config = changed(config, "data.init_args.faults", {"in_a_row": 0})
    code, text = agentrl(config=changed(config, "data.init_args.env", env))
    assert code == 1
    assert "Traceback" not in text
    message = r"agentrl: environment \d+ lost an episode.*: the environment's process ended in step with exit code 3 .*"
    assert re.fullmatch(message, text.splitlines()[-1])


def labyrinth(fault: str) -> Config:
    return {"id": "Labyrinth-v0", "kwargs": {"fault": fault}}


@pytest.mark.slow
def test_bugs_keep_their_traceback(config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("a bug while the agent plays")

    monkeypatch.setattr(Collector, "collect", broken)
    with pytest.raises(ValueError, match="a bug while the agent plays"):
        agentrl(config=config)


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_the_last_checkpoint(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, calls = Collector.collect, []

    def interrupted(self: Collector, *arguments: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return collect(self, *arguments)

    monkeypatch.setattr(Collector, "collect", interrupted)
    code, text = agentrl(config=changed(config, "trainer.max_epochs", 5))
    assert code == 130
    assert "Traceback" not in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith(
        "agentrl: stopped after iteration 2: SIGINT received, everything is saved; continue with: agentrl fit "
    )
    assert Path(last.split("--ckpt_path ")[1]).is_file()
    assert not calls[0].sessions  # threads are ended: one inside torch would abort the process at its exit
    command = shlex.split(last.split("continue with: ")[1])
    assert agentrl(*command[2:])[0] == 0  # as it is told
    assert len(calls) == 3 + 3  # iterations 3 to 5

    calls.clear()
    config["trainer"]["enable_checkpointing"] = False
    code, text = agentrl(config=changed(config, "trainer.max_epochs", 5))
    assert code == 130
    assert "there is no checkpoint yet" in text


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["connect", "setup_data"])
def test_ctrl_c_before_a_run_plays_tells_of_no_iteration(
    hook: str, config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning reads its counts after the engine has started, and puts them right later still."""
    assert agentrl(config=config)[0] == 0
    (saved,) = Path().rglob("iteration-00001.ckpt")

    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr({"connect": RolloutDataModule, "setup_data": _FitLoop}[hook], hook, interrupted)
    config = changed(config, "trainer.max_epochs", 2)
    code, text = agentrl("--ckpt_path", str(saved), config=config)
    ended = f"agentrl: stopped before its first rollout; continue with --ckpt_path {saved}"
    assert (code, text.rstrip().splitlines()[-1]) == (130, ended)
    code, text = agentrl(config=config)
    assert text.rstrip().endswith("agentrl: stopped before its first rollout; there is no checkpoint yet")


@pytest.mark.parametrize("command", ["inspect", "verify-engine"])
def test_ctrl_c_in_a_command_that_trains_nothing_tells_of_no_checkpoint(
    command: str, config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Collector, "play_held_out", interrupted)
    monkeypatch.setattr(LookOnce, "on_validation_epoch_start", interrupted)
    code, text = agentrl(config=config, command=command)
    assert (code, text.rstrip().splitlines()[-1]) == (130, "agentrl: stopped")


def test_a_run_that_a_full_disk_ends_says_how_it_goes_on(config: Config, agentrl: Command, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        log = {"class_path": "TurnLog", "init_args": {"folder": str(disk)}}
        callbacks = [log, {"class_path": "RunCheckpoints"}]
        config = changed(changed(config, "trainer.callbacks", callbacks), "trainer.max_epochs", 20)
        told = sentence(agentrl(config=config))
    assert told.startswith(f"the disk is full, cannot write '{disk}'; ")
    assert "default_root_dir" not in told  # is on another disk
    done, path = re.findall(r"\(stopped after iteration (\d+); continue with --ckpt_path (\S+)\)$", told)[0]
    assert Path(path).name == f"iteration-{int(done):05d}.ckpt"
    assert Path(path).is_file()


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
    config = changed(config, "data.init_args.validation.every", 1)
    code, text = agentrl(config=config)
    assert code == 130
    assert "Traceback" not in text
    assert (
        "stopped in the validation of iteration 3: SIGINT received, everything is saved"
        in text.rstrip().splitlines()[-1]
    )
    assert not modules[0].sessions


# Secrets of an environment

SECRET = "sk-0123456789abcdef"


class Guarded(gymnasium.Env[str, str]):
    """Plays only for those who know the key."""

    actions = {"left": "go left", "right": "go right"}
    default_action = "left"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert self.api_key == SECRET
        return "a fork in the road", {}

    def step(self, action: str) -> Any:
        return "a fork in the road", 0.0, True, False, {}


gymnasium.register("Guarded-v0", entry_point=Guarded)


@pytest.mark.slow
def test_a_run_leaves_no_secret_behind(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GUARD_KEY", SECRET)
    config = changed(config, "trainer.logger", True)
    config = changed(config, "trainer.enable_checkpointing", True)
    config = changed(config, "trainer.callbacks", [{"class_path": "TurnLog"}])
    env = ("--data.init_args.env.id=Guarded-v0", "--data.init_args.env.kwargs={api_key: '${GUARD_KEY}'}")
    code, printed = agentrl(*env, config=config)
    assert code == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.yaml", "run.json"} <= {path.name for path in files}
    assert {".ckpt", ".jsonl"} <= {path.suffix for path in files}
    assert not [path for path, content in files.items() if SECRET.encode() in content]
    assert SECRET not in printed
    record = next(path for path in files if path.name == "run.json")
    assert "${GUARD_KEY}" in json.loads(record.read_text())["command"]


def judge(pattern: str) -> dict[str, Any]:
    return {"class_path": "PatternJudge", "init_args": {"pattern": pattern, "reward": 1.0}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.init_args.env.kwargs", {"github_token": SECRET}),
        (
            "data.init_args.env.judge",
            {"class_path": "Own", "init_args": {"pattern": f"x://a:{SECRET}@h"}},
        ),
        ("data.init_args.engine", {"class_path": "VLLMServerEngine", "init_args": {"urls": [f"http://a:{SECRET}@h"]}}),
        ("data.init_args.prompt.system", f"https://a:{SECRET}@host"),
        ("trainer.logger", {"class_path": "CometLogger", "init_args": {"api_key": SECRET}}),
        ("trainer.callbacks", [{"class_path": "TurnLog", "init_args": {"folder": f"ftp://a:{SECRET}@host/x"}}]),
    ],
)
def test_a_secret_is_refused_wherever_a_config_has_it(
    key: str, value: Any, config: Config, agentrl: Command, tmp_path: Path
) -> None:
    message = sentence(agentrl(config=changed(config, key, value)))
    assert key in message
    assert SECRET not in message
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml"}


@pytest.mark.slow
def test_a_signal_in_a_validation_ends_it_and_nothing_is_saved(
    config: Config, agentrl: Command, tmp_path: Path
) -> None:
    config = changed(config, "data.init_args.engine", {"class_path": "tests.commands.test_cli_runs.Deaf"})
    code, text = agentrl(config=config, command="validate")
    assert code == 143
    assert "SIGTERM received, there was nothing to save" in text.rstrip().splitlines()[-1]
    assert not list(tmp_path.rglob("*.ckpt"))


class Deaf(TransformersEngine):
    """Is told to end and never answers."""

    async def generate(self, request: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(3600)


@pytest.mark.slow
def test_under_slurm_it_saves_and_the_job_goes_on_where_it_was(
    config: Config, agentrl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"JOB_ID": "1234", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    signalling = {
        "class_path": "tests.callbacks.signalling.SignalAt",
        "init_args": {"stage": "collect", "iteration": 1, "name": "SIGUSR1"},
    }
    config = changed(changed(config, "trainer.max_epochs", 3), "trainer.callbacks", [signalling])
    torch.save({}, tmp_path / "first.ckpt")  # where the first start went on from
    code, text = agentrl(config=config)
    assert code == 128 + signal.SIGUSR1
    assert "SIGUSR1 received, everything is saved, and job 1234 is requeued" in text
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt")["epoch"] == 1

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    config["trainer"].pop("callbacks")
    assert agentrl("--ckpt_path", str(tmp_path / "first.ckpt"), config=config)[0] == 0
    (last,) = tmp_path.rglob("last.ckpt")
    assert torch.load(last)["epoch"] == 2

    # then the machine fails, and the job is started again without a signal
    assert agentrl(config=changed(config, "trainer.max_epochs", 4))[0] == 0
    assert json.loads((tmp_path / "run.json").read_text())["continues"] == str(last)
