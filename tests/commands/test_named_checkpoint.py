"""`ckpt_path: last` and `best` are found on the disk, or refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_agentrl.callbacks import RunCheckpoints
from lightning_agentrl.callbacks.run_checkpoints import named_checkpoint
from lightning_agentrl.errors import ConfigError
from tests.agents.harness import make_trainer
from tests.cli import Command, Config, changed, sentence


def save(
    path: Path,
    minute: int,
    best: Path | None = None,
    score: float | None = None,
    iteration: int | None = None,
    stopped: bool = False,
    run: str = "a",
) -> Path:
    """What those who search read of a checkpoint; of the end of an iteration, or stopped in the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = None if score is None else torch.tensor(score)
    state = {"monitor": "val/success", "best_model_path": str(best or path), "best_model_score": known}
    saved: dict[str, Any] = {"callbacks": {"RunCheckpoints": state}}
    if iteration is not None:
        counts = {"ready": iteration, "completed": iteration if stopped else iteration - 1}
        loops = {"fit_loop": {"epoch_progress": {"current": counts}}}
        saved |= {"run_id": run, "global_step": 4 * iteration, "loops": loops}
    torch.save(saved, path)
    os.utime(path, (60 * minute, 60 * minute))
    return path


def find(word: str, root: Path, monitor: str | None = "val/success", mode: str = "max") -> Path:
    callback = RunCheckpoints(monitor=monitor, mode=mode)
    return Path(named_checkpoint(word, make_trainer(root, 1, [callback], enable_checkpointing=True)))


def test_last_is_the_newest_below_the_root_and_best_has_the_best_score(tmp_path: Path) -> None:
    first, second = (tmp_path / "logs" / name / "checkpoints" for name in ("version_0", "version_1"))
    best = save(first / "iteration-00002.ckpt", 1, score=0.7)
    save(first / "iteration-00003.ckpt", 2, best=Path("/elsewhere/iteration-00002.ckpt"), score=0.7)  # it was moved
    lower = save(second / "iteration-00004.ckpt", 3, score=0.4)
    newest = save(second / "iteration-00005.ckpt", 4, best=lower, score=0.4)
    save(tmp_path / ".trash" / "iteration-00009.ckpt", 9, score=0.9)
    (second / "iteration-00006.ckpt").write_bytes(newest.read_bytes()[:100])  # half of one, the newest of all
    save(tmp_path / "other" / "a.ckpt", 0, score=math.nan)
    assert find("last", tmp_path) == newest
    (second / "last.ckpt").symlink_to(newest.name)
    assert find("last", tmp_path) == second / "last.ckpt"  # in its place, the one before would be taken
    assert find("best", tmp_path) == best
    assert find("best", tmp_path, mode="min") == lower


def test_last_is_the_latest_iteration_whatever_the_times_of_files(tmp_path: Path) -> None:
    save(tmp_path / "iteration-00011.ckpt", 10, iteration=11)
    latest = save(tmp_path / "iteration-00012.ckpt", 1, iteration=12)
    assert find("last", tmp_path) == latest
    (tmp_path / "last.ckpt").symlink_to(latest.name)
    assert find("last", tmp_path) == tmp_path / "last.ckpt"


def test_last_is_where_a_run_was_stopped(tmp_path: Path) -> None:
    """Whether the callback that saved it made a link or not."""
    save(tmp_path / "iteration-00012.ckpt", 1, iteration=12)
    (tmp_path / "last.ckpt").symlink_to("iteration-00012.ckpt")
    stopped = save(tmp_path / "stopped-12.ckpt", 2, iteration=12, stopped=True)
    assert find("last", tmp_path) == stopped
    os.utime(stopped, (0, 0))
    (tmp_path / "last.ckpt").unlink()
    assert find("last", tmp_path) == stopped


def test_last_after_going_back_is_what_was_saved_since(tmp_path: Path) -> None:
    """Of a run that went on from iteration 10 in the same folder, those of before are still there."""
    save(tmp_path / "iteration-00012.ckpt", 1, iteration=12)
    save(tmp_path / "iteration-00011.ckpt", 2, iteration=11)
    (tmp_path / "last.ckpt").symlink_to("iteration-00011.ckpt")
    assert find("last", tmp_path) == tmp_path / "last.ckpt"


def test_last_is_of_the_last_version_and_of_the_run_that_wrote_last(tmp_path: Path) -> None:
    save(tmp_path / "logs" / "version_9" / "checkpoints" / "iteration-00012.ckpt", 5, iteration=12)
    went_on = save(tmp_path / "logs" / "version_10" / "checkpoints" / "iteration-00011.ckpt", 1, iteration=11)
    assert find("last", tmp_path) == went_on
    other = save(tmp_path / "iteration-00002.ckpt", 3, iteration=2, run="b")  # of another run
    assert find("last", tmp_path) == other
    signaled = save(tmp_path / "hpc_ckpt_1.ckpt", 4, iteration=11, stopped=True)  # of the first
    assert find("last", tmp_path) == signaled


def test_last_in_two_folders_of_one_version_is_the_latest_iteration(tmp_path: Path) -> None:
    """Which the root may lie in too."""
    root = tmp_path / "version_2"
    latest = save(root / "a" / "iteration-00012.ckpt", 1, iteration=12)
    save(root / "b" / "iteration-00011.ckpt", 2, iteration=11)
    assert find("last", root) == latest


def test_runs_of_other_names_beside_those_of_the_logger_are_none_of_it(tmp_path: Path) -> None:
    """`save_dir` may be the working folder, as it is by default of a WandbLogger."""
    own = save(tmp_path / "mine" / "version_0" / "checkpoints" / "iteration-00001.ckpt", 1)
    save(tmp_path / "other" / "version_0" / "checkpoints" / "iteration-00009.ckpt", 2)
    logger = CSVLogger(tmp_path, name="mine")
    trainer = make_trainer(tmp_path / "root", 1, [RunCheckpoints()], enable_checkpointing=True, logger=logger)
    assert named_checkpoint("last", trainer) == own


@pytest.mark.parametrize(
    ("word", "monitor", "part"),
    [
        ("last", None, "there is no checkpoint below '"),
        ("best", None, "monitor: val/success"),
        ("best", "val/return", "no best checkpoint by val/return"),
        ("hpc", None, "hpc_ckpt_"),
    ],
)
def test_a_word_that_stands_for_nothing_is_refused(tmp_path: Path, word: str, monitor: str | None, part: str) -> None:
    if word == "best":
        save(tmp_path / "iteration-00001.ckpt", 1, score=0.5)
    with pytest.raises(ConfigError, match=part) as refused:
        find(word, tmp_path, monitor)
    assert refused.value.problem.key == "ckpt_path"


@pytest.mark.slow
def test_a_run_continues_the_newest_and_validates_the_best(tmp_path: Path, config: Config, agentrl: Command) -> None:
    """Whatever the folders are called, and never from nothing."""
    saving = {"class_path": "RunCheckpoints", "init_args": {"monitor": "critic/loss", "mode": "min"}}
    config = changed(config, "trainer.callbacks", [saving, {"class_path": "RunSummary"}])
    config = changed(config, "trainer.logger", {"class_path": "CSVLogger", "init_args": {"save_dir": "runs/logs"}})
    config = changed(config, "trainer.default_root_dir", "runs")
    assert "below 'runs'" in sentence(agentrl("--ckpt_path", "last", config=config))
    assert not list(tmp_path.glob("**/summary.json"))
    assert agentrl(config=config)[0] == 0
    again = ("--trainer.max_epochs", "2", "--ckpt_path", "last", "--trainer.logger.init_args.name", "other")
    assert agentrl(*again, config=config)[0] == 0
    record = json.loads((tmp_path / "runs/logs/other/version_0/run.json").read_text())
    assert record["continues"].endswith("lightning_logs/version_0/checkpoints/last.ckpt")
    for command in ("validate", "inspect"):
        assert agentrl("--ckpt_path", "best", config=config, command=command)[0] == 0
