"""Other Lightning loggers work by config; a run folder holds config and facts of the run."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.utilities import rank_zero_only

from tests.cli import Command, Config, changed, fit


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, as W&B writes it offline: blocks of 32 KiB, a record may span several."""
    place, parts = 7, b""  # after the header of the file
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def with_logger(config: Config, kind: str, **arguments: Any) -> Config:
    logger = {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": arguments}
    return changed(config, "trainer.logger", logger)


@pytest.mark.slow
def test_a_run_folder_holds_config_and_facts(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Path,
) -> None:
    fit(
        with_logger(config, "TensorBoardLogger", save_dir="runs", name="bandit"),
        tmp_path,
        monkeypatch,
        "--seed_everything=5",
    )
    folder = tmp_path / "runs" / "bandit" / "version_0"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["seed_everything"] == 5
    assert saved["data"]["init_args"]["num_envs"] == 4
    facts = json.loads((folder / "run.json").read_text())
    assert facts["seed"] == facts["rollout"]["seed"] == 5
    assert facts["command"] == "agentrl fit --config given.yaml --seed_everything=5"
    for package in ("torch", "lightning", "transformers", "gymnasium"):
        assert facts["versions"][package] == metadata.version(package)
    assert facts["model"]["name"] == str(tiny_folder)
    assert facts["model"]["type"] == "llama"
    assert facts["model"]["parameters"]["critic"] == {"all": 33, "trained": 33}  # 32 weights and a bias
    assert facts["machine"]["processes"] == 1

    monkeypatch.chdir(tmp_path)
    saved["trainer"]["logger"]["init_args"]["version"] = None
    fit(saved, tmp_path, monkeypatch)  # what was saved runs again, in the same folder
    assert (tmp_path / "runs" / "bandit" / "version_1" / "run.json").is_file()


@pytest.mark.slow
def test_csv(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = changed(with_logger(config, "CSVLogger", save_dir="runs", name="bandit"), "trainer.max_epochs", 2)
    two["trainer"]["callbacks"] = [{"class_path": "TurnLog"}]
    fit(two, tmp_path, monkeypatch)
    folder = tmp_path / "runs" / "bandit" / "version_0"
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/reward_per_turn"]]
    assert len(rows) == 2
    assert all(math.isfinite(float(row["rollout/reward_per_turn"])) for row in rows)
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "run.json", "turns"}
    assert len((folder / "turns" / "rank0-000000.jsonl").read_text().splitlines()) == 16


FILES = {"summary.json", "run.json", "config.yaml"}
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def test_a_stale_rank_hides_no_file(
    config: Config, tmp_path: Path, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # Lightning reads the variable as it is imported
    assert agentrl(config=changed(config, "trainer.callbacks", [{"class_path": "RunSummary"}]))[0] == 0
    assert {path.name for path in tmp_path.iterdir()} >= FILES


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_one_process_with_a_stale_rank_writes_all_files(name: str, config: Config, tmp_path: Path) -> None:
    config = with_logger(config, "TensorBoardLogger", save_dir="runs", name="bandit")
    config["trainer"]["callbacks"] = [{"class_path": "RunSummary"}]
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    environment = {key: value for key, value in os.environ.items() if key not in RANKS}
    environment |= {"OMP_NUM_THREADS": "1", name: "1"}
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", "given.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "bandit" / "version_0"
    assert {path.name for path in run.iterdir()} >= FILES
    assert list(run.glob("checkpoints/*.ckpt"))
    assert any(path.stat().st_size > 1000 for path in run.glob("events.out.tfevents*"))
    assert '"after"' in done.stdout  # the summary is printed, too


@pytest.mark.slow
def test_weights_and_biases_offline(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real package, writing to a file: numbers, the readable episodes, histograms and the config arrive."""
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    wanted = with_logger(config, "WandbLogger", save_dir="runs", project="bandit", offline=True, version="first")
    fit(wanted, tmp_path, monkeypatch)
    import wandb

    wandb.finish()  # else the next logger in this process goes on with this run
    wandb.teardown()  # waits until its process has ended: after `finish` the end of the file may not be written yet
    folder = tmp_path / "runs" / "bandit" / "first"
    assert json.loads((folder / "run.json").read_text())["model"]["type"] == "llama"
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]["num_envs"] == 4

    (written,) = (tmp_path / "runs").rglob("*.wandb")
    logged: set[str] = set()
    settings: set[str] = set()
    for data in log_records(written.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        logged |= {item.key or "/".join(item.nested_key) for item in record.history.item}
        settings |= {item.key or "/".join(item.nested_key) for item in record.run.config.update}
        settings |= {item.key or "/".join(item.nested_key) for item in record.config.update}
    assert {"rollout/reward_per_turn", "kl/reference", "critic/explained_variance", "time/collect_seconds"} <= logged
    assert {"episode/0/_type", "histogram/turn_reward/_type"} <= logged
    assert {"model", "data", "trainer"} <= {name.split("/")[0] for name in settings}
