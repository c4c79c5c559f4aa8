"""Runs whose checkpoints meet full disks, kills and damage."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_agentrl.agents import PPOAgent, checkpoint
from lightning_agentrl.agents.checkpoint import MANIFEST, damage, guard_checkpoints, last_good_checkpoint
from lightning_agentrl.agents.checks import check_trainer
from lightning_agentrl.callbacks import RunCheckpoints
from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import fit as fit_by_command
from tests.disks import mounted
from tests.started import forkserver


def fit(
    path: Path, model: Path, epochs: int, *callbacks: L.Callback, ckpt_path: str | None = None
) -> tuple[L.Trainer, PPOAgent]:
    agent = make_agent(model)
    trainer = make_trainer(path, epochs, list(callbacks), enable_checkpointing=bool(callbacks))
    trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
    return trainer, agent


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(checkpoint: Path) -> None:
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.write_bytes(data)


def same_weights(one: PPOAgent, other: PPOAgent) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with space for two checkpoints of the tiny model, and for no third."""
    with mounted(tmp_path / "disk", "2m") as folder:
        yield folder


class Remembering(L.Callback):
    """Has a number of numpy's in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": np.float64(0.5)}


def test_what_no_run_reads_is_told_as_it_is_saved(tiny_folder: Path, tmp_path: Path) -> None:
    message = r"it holds an object of numpy\S+; use plain types in the state_dict of your callbacks"
    with pytest.warns(UserWarning, match=rf"agentrl fit cannot continue from this checkpoint: {message}"):
        fit(tmp_path, tiny_folder, 1, RunCheckpoints(dirpath=str(tmp_path)), Remembering())
    with pytest.raises(CheckpointError, match=rf"cannot be read: {message}"):
        fit(tmp_path, tiny_folder, 2, Remembering(), ckpt_path=str(tmp_path / "iteration-00001.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("callback", [RunCheckpoints, pytest.param(ModelCheckpoint, marks=pytest.mark.slow)])
def test_a_full_disk_loses_nothing(tiny_folder: Path, tmp_path: Path, disk: Path, callback: Any) -> None:
    """Not with Lightning's own callback either, whose next checkpoint has to fit beside the last."""
    (disk / "full").write_bytes(bytes(2**20 if callback is ModelCheckpoint else 0))
    saving = callback(dirpath=str(disk / "saved"))
    with pytest.raises(CheckpointNotSavedError) as error:
        fit(tmp_path, tiny_folder, 4, saving)
    last = Path(error.value.before)
    there = [disk / "saved" / name for name in names(disk / "saved") if name != "last.ckpt"]
    assert there[-1] == last
    assert len(there) == (2 if callback is RunCheckpoints else 1)
    for path in there:
        assert damage(path) == ""
    saved = torch.load(last, weights_only=True)
    assert saved["epoch"] == len(there) - 1


@pytest.mark.slow
def test_the_newest_is_damaged_and_the_run_goes_on_from_the_one_before(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    trainer, whole = fit(tmp_path, tiny_folder, 4, RunCheckpoints(dirpath=str(saved)))
    assert names(saved) == ["iteration-00003.ckpt", "iteration-00004.ckpt", "last.ckpt"]
    assert last_good_checkpoint(trainer) == str(saved / "iteration-00004.ckpt")
    flip(saved / "iteration-00004.ckpt")
    with pytest.raises(CheckpointError, match=r"is damaged.*iteration-00003\.ckpt"):
        fit(tmp_path, tiny_folder, 4, ckpt_path=str(saved / "iteration-00004.ckpt"))
    with pytest.warns(UserWarning, match=r"iteration-00004\.ckpt' is damaged.*iteration-00003\.ckpt"):
        trainer, resumed = fit(tmp_path, tiny_folder, 4, RunCheckpoints(dirpath=str(saved)), ckpt_path="last")
    assert same_weights(whole, resumed)
    assert not any(damage(saved / name) for name in names(saved))


def test_the_one_before_a_damaged_one_is_that_of_the_iteration_before(tmp_path: Path) -> None:
    """Whatever the times of the files, which copies lose."""
    for minute, iteration in ((2, 10), (1, 11), (3, 12)):
        counts = {"ready": iteration, "completed": iteration - 1}
        loops = {"fit_loop": {"epoch_progress": {"current": counts}}}
        saved = {"run_id": "a", "global_step": iteration, "loops": loops, "pytorch-lightning_version": "2.6.0"}
        saved["state_dict"] = {"weight": torch.ones(1000)}
        torch.save(saved, path := tmp_path / f"iteration-{iteration:05d}.ckpt")
        os.utime(path, (60 * minute, 60 * minute))
    flip(path)
    (tmp_path / "last.ckpt").symlink_to(path.name)
    trainer = make_trainer(tmp_path, 1)
    guard_checkpoints(trainer)
    with pytest.warns(UserWarning, match=r"continuing from the one before it"):
        assert trainer.strategy.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 11


@pytest.mark.slow
def test_all_are_damaged_and_the_run_does_not_begin_anew(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fit(tmp_path, tiny_folder, 1, RunCheckpoints(dirpath=str(saved)))
    flip(saved / "iteration-00001.ckpt")
    with pytest.raises(CheckpointError, match="is damaged"):
        fit(tmp_path, tiny_folder, 2, RunCheckpoints(dirpath=str(saved)), ckpt_path="last")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_last_ones_and_the_best_are_kept(tiny_folder: Path, tmp_path: Path, mode: Any) -> None:
    class Scores(L.Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.values.append(float(trainer.callback_metrics["critic/loss"]))

    saving = RunCheckpoints(monitor="critic/loss", mode=mode, dirpath=str(tmp_path / "saved"))
    scores = Scores()
    fit(tmp_path, tiny_folder, 5, scores, saving)
    best = 1 + scores.values.index((max if mode == "max" else min)(scores.values))
    assert names(tmp_path / "saved") == [*(f"iteration-{i:05d}.ckpt" for i in sorted({best, 4, 5})), "last.ckpt"]
    assert Path(saving.best_model_path).name == f"iteration-{best:05d}.ckpt"
    assert (tmp_path / "saved" / "last.ckpt").resolve().name == "iteration-00005.ckpt"
    again = RunCheckpoints(monitor="critic/loss", mode=mode, dirpath=str(tmp_path / "saved"))
    fit(tmp_path, tiny_folder, 6, again, ckpt_path="last")  # it knows what to remove
    assert f"iteration-{best:05d}.ckpt" in names(tmp_path / "saved")
    assert len(names(tmp_path / "saved")) <= 4


def test_saving_beside_training_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO.*trainer\.plugins"):
        check_trainer(trainer, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_folder_of_shares_replaces_the_one_before_and_is_refused_once_it_is_damaged(
    exact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FSDP2 saves it, by the command, twice under the same name."""
    sharded = (
        "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, "
        "init_args: {data_parallel_size: 1, tensor_parallel_size: 1, save_distributed_checkpoint: true}}"
    )
    saved = fit_by_command(tmp_path, exact_folder, "SharedCritic", 1, "--trainer.max_epochs", "2", strategy=sharded)
    assert (saved / MANIFEST).is_file()
    assert damage(saved) == ""
    assert not [name for name in names(tmp_path) if name.endswith((".part", ".old"))]
    (share,) = saved.glob("*.distcp")
    flip(share)
    again = ("--trainer.max_epochs", "3", "--ckpt_path", str(saved))
    with pytest.raises(SystemExit):
        fit_by_command(tmp_path, exact_folder, "SharedCritic", 1, *again, strategy=sharded)
    assert f"the checkpoint '{saved}' is damaged: {share.name} is not as it was written" in capsys.readouterr().err
    flip(share)
    fit_by_command(tmp_path, exact_folder, "SharedCritic", 1, *again, strategy=sharded)
    assert torch.load(saved / "meta.pt", weights_only=True)["epoch"] == 2


def fit_until_killed(path: Path, model: Path) -> None:
    """Be killed in the middle of writing the fourth checkpoint."""
    torch.set_num_threads(1)
    put_in_place, saves = checkpoint._put_in_place, itertools.count(1)

    def killed(part: Path, target: Path) -> None:
        if next(saves) == 4:
            os.truncate(part, part.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        put_in_place(part, target)

    checkpoint._put_in_place = killed
    fit(path, model, 40, RunCheckpoints(dirpath=str(path / "saved"), keep=3))


@pytest.mark.slow  # a process of its own
def test_a_run_killed_while_it_saves_goes_on_as_if_it_had_not_been(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run = forkserver().Process(target=fit_until_killed, args=(tmp_path, tiny_folder))
    run.start()
    run.join(300)
    assert run.exitcode == -signal.SIGKILL
    assert [path.name for path in saved.glob("*.part")] == ["iteration-00004.ckpt.part"]
    last = int((saved / "last.ckpt").resolve().name[-10:-5])
    _, resumed = fit(tmp_path, tiny_folder, last + 2, RunCheckpoints(dirpath=str(saved)), ckpt_path="last")
    assert not any(saved.glob("*.part"))
    _, whole = fit(tmp_path / "whole", tiny_folder, last + 2)
    assert same_weights(whole, resumed)
