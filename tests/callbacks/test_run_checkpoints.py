"""RunCheckpoints of several runs from Python, and of one that goes on in another folder."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_agentrl import Trainer
from lightning_agentrl.callbacks import EngineCheck, RunCheckpoints
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
        ids.append(agent.run_id)
        best.append((saving.best_model_score, trainer.callback_metrics["rollout/reward_per_turn"]))
        folder = tmp_path / "logs" / f"version_{place}" / "checkpoints"
        assert saving.saved == [saving.best_model_path] == [str(folder / "iteration-00001.ckpt")]
    saved = sorted(tmp_path.glob("logs/*/checkpoints/last.ckpt"))
    assert [torch.load(path, weights_only=True)["run_id"] for path in saved] == ids
    assert [score for score, _ in best] == [reward for _, reward in best]  # not the better one of both


class Counts(L.Callback):
    """Logs a number that only grows, so that the first checkpoint of a run is the best by its smallest value."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("number", float(trainer.current_epoch))


@pytest.mark.slow
@pytest.mark.parametrize("removed", [False, True])
def test_the_best_of_a_run_that_goes_on_in_another_folder_is_that_of_the_whole_run(
    removed: bool, tmp_path: Path, tiny_folder: Path
) -> None:
    """Unless it is there no more: then one of the new folder is the best."""

    def fit(iterations: int, start: Path | None = None) -> RunCheckpoints:
        saving = RunCheckpoints(monitor="number", mode="min", every_n_epochs=2)
        logger = CSVLogger(tmp_path, name="logs")
        trainer = make_trainer(tmp_path, iterations, [Counts(), saving], enable_checkpointing=True, logger=logger)
        trainer.fit(make_agent(tiny_folder), make_data(), ckpt_path=start)
        return saving

    first = fit(2)
    folder = tmp_path / "logs" / "version_1" / "checkpoints"
    best, start = Path(first.best_model_path), Path(first.last_model_path)
    assert [path.name for path in (best, start)] == ["iteration-00001.ckpt", "iteration-00002.ckpt"]
    if removed:
        best.unlink()
    second = fit(4, start)
    saved = sorted(path.name for path in folder.glob("iteration-*"))
    if removed:
        assert second.best_model_path == str(folder / "iteration-00003.ckpt")
        assert saved == ["iteration-00003.ckpt", "iteration-00004.ckpt"]
    else:
        assert second.best_model_path == str(best)
        assert saved == ["iteration-00004.ckpt"]
        assert best.is_file()


@pytest.mark.slow
def test_last_from_python_is_that_of_lightnings_own_callback_too(tmp_path: Path, tiny_folder: Path) -> None:
    for iterations in (1, 2):
        callback = ModelCheckpoint(save_last=True)
        trainer = make_trainer(tmp_path, iterations, [callback], enable_checkpointing=True)
        trainer.fit(make_agent(tiny_folder), make_data(), ckpt_path="last")
        assert trainer.global_step == 2 * iterations
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_last_from_python_is_in_the_version_before(tmp_path: Path, tiny_folder: Path) -> None:
    ids = []
    for iterations in (1, 2):
        logger = CSVLogger(tmp_path, name="logs")
        trainer = Trainer(
            max_epochs=iterations,
            default_root_dir=tmp_path,
            callbacks=[EngineCheck("off")],
            logger=logger,
            accelerator="cpu",
            precision="64-true",
            enable_progress_bar=False,
            limit_val_batches=0,
        )
        agent = make_agent(tiny_folder)
        trainer.fit(agent, make_data(), ckpt_path="last")
        ids.append(agent.run_id)
    assert trainer.global_step == 4
    assert ids[0] == ids[1]
    assert len(list(tmp_path.glob("logs/version_*/checkpoints/last.ckpt"))) == 2


@pytest.mark.slow
def test_the_checkpoint_that_a_run_continues_stays(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for iterations, start in ((1, None), (3, "saved/iteration-00001.ckpt")):
        saving = RunCheckpoints(keep=1, dirpath="saved")
        trainer = make_trainer(tmp_path, iterations, [saving], enable_checkpointing=True)
        trainer.fit(make_agent(tiny_folder), make_data(), ckpt_path=start)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["iteration-00001.ckpt", "iteration-00003.ckpt", "last.ckpt"]


def test_a_run_saves_every_few_iterations_and_its_last(tmp_path: Path, tiny_folder: Path) -> None:
    trainer = Trainer(
        max_epochs=6, default_root_dir=tmp_path, accelerator="cpu", logger=False, callbacks=[EngineCheck()]
    )
    trainer.fit(make_agent(tiny_folder), make_data())
    (folder,) = {path.parent for path in tmp_path.rglob("*.ckpt")}
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration-00005.ckpt",
        "iteration-00006.ckpt",
        "last.ckpt",
    ]
