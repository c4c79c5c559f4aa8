"""Run: a checkpoint holds all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_agentrl.errors import CheckpointError
from tests.agents.harness import make_agent, make_data, make_trainer


def test_a_run_goes_on_from_the_entries_of_a_checkpoint(tmp_path: Path, tiny_folder: Path) -> None:
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_agent(tiny_folder), make_data())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    saved = torch.load(tmp_path / "first.ckpt", weights_only=True)
    assert {"settings", "weights", "versions"} < saved["agent"].keys()
    ended = [((0, place), 0, place, True) for place in range(30)]
    written = {  # as if two attempts more had been made than steps were taken
        "run_id": "earlier",
        "recent_episodes": {"rollouts": 1, "running": {}, "ended": ended},
        "attempts": saved["attempts"] + 2,
        "skipped": 2,
        "warmup_steps": 0,
        "not_finite_in_a_row": 1,
    }
    assert written.keys() < saved.keys()
    torch.save(saved | written, tmp_path / "first.ckpt")
    trainer, agent = make_trainer(tmp_path, 1), make_agent(tiny_folder)  # goes on from its end, and trains no more
    trainer.fit(agent, make_data(), ckpt_path=tmp_path / "first.ckpt")
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    again = torch.load(tmp_path / "second.ckpt", weights_only=True)
    assert {name: again[name] for name in written} == written
    assert agent.policy_version == written["attempts"]


def test_a_checkpoint_of_another_program_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="it was not saved by agentrl fit"):
        make_agent(tiny_folder).on_load_checkpoint({"state_dict": {}, "global_step": 3})
