"""Two DDP processes on the CPU give the weights of one, through the command that a user types."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest
import torch

CONFIG = """
seed_everything: 0
model:
  class_path: PPOAgent
  init_args:
    model: {folder}
    critic: {{class_path: {critic}}}
    kl_in_reward: 0.01
    lr_actor: 1.0e-3
    lr_critic: 1.0e-2
    max_tokens_per_micro_batch: 300
data:
  class_path: RolloutDataModule
  init_args:
    env: {{id: "agentrl_envs:GuessNumber-v0"}}
    num_envs: 4
    turns_per_env: 4
    mini_batch_turns: 8
    prompt: {{think: false, max_prompt_tokens: 512}}
    interaction: {{class_path: TurnInteraction, init_args: {{max_reply_tokens: 4}}}}
    validation: {{episodes: 6, num_envs: 2}}
trainer:
  accelerator: cpu
  precision: 64-true
  max_epochs: 5
  check_val_every_n_epoch: 5
  enable_progress_bar: false
  enable_model_summary: false
  logger: {{class_path: CSVLogger, init_args: {{save_dir: {path}/devices}}}}
  callbacks:
    - {{class_path: CriticWarmup, init_args: {{rollouts: 4, rounds: 1, fraction: 0.5}}}}
    - class_path: ModelCheckpoint
      init_args: {{dirpath: "{path}", filename: "last", enable_version_counter: false, save_on_train_epoch_end: true}}
"""


def fit(path, folder, critic, devices, *arguments):
    path.mkdir(exist_ok=True)
    config = path / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, critic=critic, path=path))
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(config), *arguments]
    command += ["--trainer.devices", str(devices), "--trainer.strategy", "ddp" if devices > 1 else "auto"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path / "last.ckpt", weights_only=True)


def metrics(path):
    """What was logged, by step; times left out."""
    (file,) = path.glob("devices/**/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    return [{k: float(v) for k, v in row.items() if v and not k.startswith("time/")} for row in rows]


def test_two_processes_give_the_weights_of_one(tmp_path, exact_folder):
    """Five iterations, the first two of them warm-up; what is logged is equal too."""
    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1)
    two = fit(tmp_path / "two", exact_folder, "SharedCritic", 2)
    assert_same(one, two)
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)
    assert any(row.get("val/episodes") == 6 for row in logged[1])


def test_two_processes_stop_inside_the_warm_up_and_go_on_like_one(tmp_path, exact_folder):
    """The warm-up's data of both processes are in the checkpoint. With a critic of its own backbone."""
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1)
    stopped = tmp_path / "stopped"
    fit(stopped, exact_folder, "SeparateCritic", 2, "--trainer.max_epochs", "1")
    resumed = fit(stopped, exact_folder, "SeparateCritic", 2, "--ckpt_path", str(stopped / "last.ckpt"))
    assert_same(one, resumed)


@pytest.mark.slow
def test_two_processes_train_the_adapters_of_one(tmp_path, exact_folder):
    """Actor and critic on one frozen base."""
    lora = ("--model.init_args.lora", "{class_path: LoRA, init_args: {rank: 4}}")
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *lora)
    two = fit(tmp_path / "two", exact_folder, "SeparateCritic", 2, *lora)
    assert all(".lora_" in name or ".head." in name for name in one["state_dict"])
    assert any(".lora_B.actor" in name and weight.any() for name, weight in one["state_dict"].items())
    assert_same(one, two)


def assert_same(a, b):
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name, weight in a["state_dict"].items():
        assert torch.allclose(weight, b["state_dict"][name], rtol=0, atol=1e-8), name
    # every environment of every rank is in the checkpoint
    assert a["RolloutDataModule"]["sessions"] == b["RolloutDataModule"]["sessions"]
