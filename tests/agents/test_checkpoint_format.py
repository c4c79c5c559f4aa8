"""A checkpoint has a format, a number that rises when what it holds changes; another one is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_agentrl.agents.resume import FORMAT, KEY
from lightning_agentrl.callbacks import CriticWarmup, RunSummary
from lightning_agentrl.errors import CheckpointError
from tests.agents.harness import make_agent, make_data, make_trainer

# What this package writes. Raise FORMAT with every change.
WRITTEN = {
    "": "RolloutDataModule agent attempts date kl_coefficient not_finite_in_a_row recent_episodes run_id "
    "skipped warmup_steps",
    "RolloutDataModule": "ahead collected iteration lost origin sessions",
    "RolloutDataModule.sessions.0": "actions asked_again context env_errors env_return fingerprint images lost number "
    "past reply_closed reply_tokens running said seed summaries summarized summary turns_taken unread",
    "agent": "format lora model policy settings undescribed versions weights",
    "callbacks.CriticWarmup": "buffer done_epochs prepared",
    "callbacks.RunSummary": "before minutes",
    "kl_coefficient": "value",
    "recent_episodes": "ended rollouts running",
}
LIGHTNING = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"}
LIGHTNING |= {"optimizer_states", "lr_schedulers", "hyper_parameters", "hparams_name"}


def trainer_of(path: Path, epochs: int) -> L.Trainer:
    return make_trainer(path, epochs, [CriticWarmup(rollouts=1, rounds=1, fraction=1.0), RunSummary()])


@pytest.fixture
def checkpoint(tiny_folder: Path, tmp_path: Path) -> Path:
    trainer = trainer_of(tmp_path, 2)
    trainer.fit(make_agent(tiny_folder), datamodule=make_data())
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt")
    return path


def test_its_entries_are_those_of_its_format(checkpoint: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    assert saved[KEY]["format"] == FORMAT == 6
    for way, entries in WRITTEN.items():
        held: Any = saved
        for part in filter(None, way.split(".")):
            held = held[int(part) if part.isdigit() else part]
        assert held.keys() - (LIGHTNING if not way else set()) == set(entries.split()), way


@pytest.mark.parametrize("form", [None, 1, 4])
def test_another_format_is_refused(checkpoint: Path, tiny_folder: Path, tmp_path: Path, form: int | None) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    saved[KEY]["format"] = form
    del saved["warmup_steps"]  # as another version may lack
    torch.save(saved, other := tmp_path / "other.ckpt")
    expected = f"another version of lightning_agentrl: its format is {form}, this version reads {FORMAT}; continue with"
    with pytest.raises(CheckpointError, match=expected):
        trainer_of(tmp_path, 3).fit(make_agent(tiny_folder), datamodule=make_data(), ckpt_path=other)
    with pytest.raises(CheckpointError, match=expected):
        type(make_agent(tiny_folder)).load_from_checkpoint(other)
