"""RunCheckpoints that are given to several runs from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_agentrl.callbacks import RunCheckpoints
from tests.agents.harness import make_agent, make_data, make_trainer


@pytest.mark.slow
def test_a_second_run_saves_in_its_own_folder_and_leaves_the_checkpoints_of_the_first(
    tmp_path: Path, tiny_folder: Path
) -> None:
    saving = RunCheckpoints(keep=1, monitor="rollout/reward_per_turn")
    best, ids = [], []
    for place, seed in enumerate((3, 4)):
        agent = make_agent(tiny_folder)
        trainer = make_trainer(
            tmp_path, 1, [saving], enable_checkpointing=True, logger=CSVLogger(tmp_path, name="logs")
        )
        trainer.fit(agent, make_data(seed=seed))
        ids.append(agent.run.id)
        best.append((saving.best_model_score, trainer.callback_metrics["rollout/reward_per_turn"]))
        folder = tmp_path / "logs" / f"version_{place}" / "checkpoints"
        assert saving.saved == [saving.best_model_path] == [str(folder / "iteration-00001.ckpt")]
    saved = sorted(tmp_path.glob("logs/*/checkpoints/last.ckpt"))
    assert [torch.load(path, weights_only=True)["run_id"] for path in saved] == ids
    assert [score for score, _ in best] == [reward for _, reward in best]  # not the better one of both
