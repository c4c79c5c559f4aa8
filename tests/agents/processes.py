"""Runs of the command on the CPU: one process in that of the test, several in such as have imported all already."""

from __future__ import annotations

import csv
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_agentrl.commands import main as commands
from tests.started import outcomes

CONFIG = """
seed_everything: 0
model:
  class_path: PPOAgent
  init_args:
    model: {folder}
    critic: {{class_path: {critic}}}
    kl: {{reward: 0.01}}
    optim: {{lr_actor: 1.0e-3, lr_critic: 1.0e-2}}
    compute: {{max_tokens_per_micro_batch: 300}}
data:
  class_path: RolloutDataModule
  init_args:
    env: {{id: "agentrl_envs:GuessNumber-v0"}}
    num_envs: 4
    turns_per_env: 4
    mini_batch_turns: 8
    prompt: {{think: false, max_prompt_tokens: 512}}
    interaction: {{class_path: TurnInteraction, init_args: {{max_reply_tokens: 4}}}}
    validation: {{episodes: 6, num_envs: 2, every: 5}}
trainer:
  accelerator: cpu
  max_epochs: 5
  enable_progress_bar: false
  enable_model_summary: false
  plugins: {plugins}
  logger: {{class_path: CSVLogger, init_args: {{save_dir: {path}/devices}}}}
  callbacks:
    - {{class_path: CriticWarmup, init_args: {{rollouts: 4, rounds: 1, fraction: 0.5}}}}
    - class_path: ModelCheckpoint
      init_args: {{dirpath: "{path}", filename: "last", enable_version_counter: false, save_on_train_epoch_end: true}}
"""
POPART = ("--model.init_args.critic.init_args.popart", "0.3")
DOUBLE = "[{class_path: lightning.pytorch.plugins.precision.DoublePrecision}]"  # 64-true, in a form that FSDP2 takes


def config_text(path: Path, folder: Path, critic: str, plugins: str = DOUBLE) -> str:
    """The config of a run in ``path``."""
    return CONFIG.format(folder=folder, critic=critic, path=path, plugins=plugins)


def fit(
    path: Path,
    folder: Path,
    critic: str,
    devices: int,
    *arguments: str,
    strategy: str | None = None,
    plugins: str = DOUBLE,
    typed: bool = False,
) -> Path:
    """Fit for five iterations, the first two of them warm-up, in float64. The checkpoint.

    Args:
        path: folder of the run.
        folder: of the model.
        critic: short class name.
        devices: processes.
        arguments: of the command, behind the config.
        strategy: key trainer.strategy; DDP for several processes when not given.
        plugins: key trainer.plugins.
        typed: several processes are started as by a user, who types the command; it takes longer, since each imports.
    """
    path.mkdir(exist_ok=True)
    config = path / "config.yaml"
    config.write_text(config_text(path, folder, critic, plugins))
    command = ["fit", "--config", str(config), "--trainer.devices", str(devices)]
    command += ["--trainer.strategy", strategy or ("ddp" if devices > 1 else "auto"), *arguments]
    if devices == 1:
        with mock.patch.dict(os.environ):  # a rank is left there
            run_command(path, command)
    elif typed:
        command = [sys.executable, "-m", "lightning_agentrl", *command]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(next_port())}
        done = subprocess.run(command, capture_output=True, text=True, cwd=path, env=environment, timeout=540)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        run_ranks(path, command, devices)
    return path / "last.ckpt"


def run_command(path: Path, command: Sequence[str]) -> None:
    """Run the command in this process."""
    with chdir(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["agentrl", *command])
        patch.setattr(commands, "keep_freed_memory", lambda: True)
        commands.main()


def run_ranks(path: Path, command: Sequence[str], devices: int, seconds: float = 540) -> None:
    """Run the command in so many processes, which are told, as by a launcher, that the others are there."""
    ends = outcomes(devices, _rank, next_port(), path, command, folder=path, seconds=seconds)
    codes, said = [code for code, _ in ends], "\n".join(text[-3000:] for _, text in ends)
    assert codes == [0] * devices, f"exit codes {codes}: {said}"


def _rank(rank: int, port: int, path: Path, command: Sequence[str]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": str(port)}
    run_command(path, command)


def next_port() -> int:
    """Free, and of no other worker of the tests: Lightning's own choice is made long before it is used."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in _ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1000 * worker)) != 0:
                return port + 1000 * worker
    raise RuntimeError("no port is free")


# Below those that systems give away. Another test run begins elsewhere: a process that it left behind would join ours.
_first = 20_000 + os.getpid() % 1000
_ports = itertools.cycle([*range(_first, 21_000), *range(20_000, _first)])


def read(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, map_location="cpu", weights_only=True)


def metrics(path: Path, times: bool = False) -> list[dict[str, float]]:
    """What was logged, by step; with times or without."""
    (file,) = path.glob("devices/**/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    return [{k: float(v) for k, v in row.items() if v and (times or not k.startswith("time/"))} for row in rows]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Weights, state of the optimizer by its place in it, and environments of two checkpoints."""
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name, weight in a["state_dict"].items():
        assert torch.allclose(weight, b["state_dict"][name], rtol=0, atol=1e-8), name
    for one, two in zip(optimizer_states(a), optimizer_states(b), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert torch.allclose(one[key], two[key], rtol=0, atol=1e-8), key
    # every environment of every rank is in the checkpoint
    assert_alike(a["RolloutDataModule"]["sessions"], b["RolloutDataModule"]["sessions"])


def assert_alike(a: Any, b: Any) -> None:
    """Plain types, numbers up to rounding; how long things took does not count."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"env_seconds", "engine_seconds"}:
            assert_alike(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            assert_alike(one, two)
    elif isinstance(a, float):
        assert abs(a - b) < 1e-8
    else:
        assert a == b


def optimizer_states(checkpoint: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Adam's, in the order of the parameters."""
    (state,) = checkpoint["optimizer_states"]
    return [state["state"][i] for group in state["param_groups"] for i in group["params"]]
