"""Two DDP processes on the CPU give the weights of one, through the command that a user types."""

from __future__ import annotations

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
  max_epochs: 4
  check_val_every_n_epoch: 4
  enable_progress_bar: false
  enable_model_summary: false
  logger: {{class_path: CSVLogger, init_args: {{save_dir: {path}/devices}}}}
  callbacks:
    - {{class_path: CriticWarmup, init_args: {{rollouts: 2, rounds: 1, fraction: 0.5}}}}
    - class_path: ModelCheckpoint
      init_args: {{dirpath: "{path}", filename: "last", save_on_train_epoch_end: true}}
"""


@pytest.mark.parametrize("critic", ["SharedCritic", "SeparateCritic"])
def test_two_processes_give_the_weights_of_one(tmp_path, exact_folder, critic):
    """Four iterations, the first of them warm-up; ranks hold different numbers of micro-batches."""
    saved = []
    for devices in (1, 2):
        path = tmp_path / str(devices)
        path.mkdir()
        config = path / "config.yaml"
        config.write_text(CONFIG.format(folder=exact_folder, critic=critic, path=path))
        command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(config)]
        command += ["--trainer.devices", str(devices), "--trainer.strategy", "ddp" if devices > 1 else "auto"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=path, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        saved.append(torch.load(path / "last.ckpt", weights_only=True))
    one, two = (checkpoint["state_dict"] for checkpoint in saved)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=1e-8), name
    sessions = [checkpoint["RolloutDataModule"]["sessions"] for checkpoint in saved]
    assert sessions[0] == sessions[1]  # every environment of every rank is in the checkpoint
