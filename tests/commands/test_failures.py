"""What ends a run and its user can change: memory, a full disk, a checkpoint that cannot be continued from."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_agentrl.agents.checkpoint import written_whole
from lightning_agentrl.agents.resume import check_weights
from lightning_agentrl.commands.ending import explained
from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError, EnvError
from tests.agents.processes import next_port
from tests.cli import Command, Config, changed, run_command, sentence
from tests.disks import mounted


def test_memory_that_ran_out_in_no_stage_names_the_keys_of_all() -> None:
    message = str(explained(MemoryError()))
    assert message.startswith("out of memory on the CPU; while collecting, lower")
    assert "in training, lower" in message


def test_memory_that_an_environment_took_is_not_ours() -> None:
    assert explained(EnvError("MemoryError", "the environment raised MemoryError")) is None


def test_bugs_have_no_sentence() -> None:
    for bug in (RuntimeError("shape mismatch"), KeyError("x"), FileNotFoundError(2, "No such file", "x")):
        assert explained(bug, "update") is None


def test_a_model_whose_weights_are_damaged_is_named(
    tiny_folder: Path,
    tmp_path: Path,
    config: Config,
    agentrl: Command,
) -> None:
    damaged = Path(shutil.copytree(tiny_folder, tmp_path / "damaged"))
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    message = sentence(agentrl(config=changed(config, "model.init_args.model", str(damaged))))
    assert message.startswith(f"the model '{damaged}' cannot be loaded (key model.init_args.model)")


# Disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "16k") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_disk_says_which_checkpoint_was_not_saved_and_what_to_change(
    small_disk: Path,
    config: Config,
    agentrl: Command,
) -> None:
    saving = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(small_disk), "filename": "here"}}
    message = sentence(agentrl(config=changed(config, "trainer.callbacks", [saving])))
    for part in ("the disk is full", f"'{small_disk}/here.ckpt'", "every_n_epochs", "keep)"):
        assert part in message
    assert message.endswith("there is no checkpoint yet")


@pytest.mark.parametrize(
    "write",
    [
        lambda checkpoint, path: torch.save(checkpoint, path),  # as DeepSpeed does
        lambda checkpoint, path: dcp.save(checkpoint, checkpoint_id=path),  # as FSDP2 does
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_is_told_by_whatever_writes(write: Callable[..., None], small_disk: Path) -> None:
    with pytest.raises(CheckpointNotSavedError) as caught, written_whole(small_disk / "here.ckpt", "") as part:
        write({"a": torch.zeros(100_000)}, part)
    assert caught.value.filename == str(small_disk / "here.ckpt")
    assert caught.value.before == ""
    assert list(small_disk.iterdir()) == []  # no half of one


def test_a_log_on_a_full_disk_is_no_checkpoint() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_text("a line of a log")
    message = str(explained(caught.value))
    assert "the disk is full" in message
    assert "keep" not in message
    assert "default_root_dir" not in message  # it was another file, and the system does not say which


def test_a_folder_that_can_only_be_read_is_told(tmp_path: Path, config: Config, agentrl: Command) -> None:
    with mounted(tmp_path / "disk", "8k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, said = agentrl(config=changed(config, "trainer.default_root_dir", str(disk)))
    assert code == 2
    assert f"'{disk}/config.part' cannot be used: Read-only file system" in said


def test_what_slurm_was_asked_for_and_lightning_refuses_is_told(
    config: Config, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JOB_ID": "1", "JOB_NAME": "train", "NTASKS": "4", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "--ntasks-per-node=4" in sentence(agentrl(config=config))


def test_what_lightning_refuses_to_code_of_ones_own_is_shown_with_its_line(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import lightning as L\n"
        "class Logs(L.Callback):\n"
        "    def on_fit_start(self, trainer, agent):\n"
        "        agent.log('mine', 1.0)\n"
    )
    (tmp_path / "my_logs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = changed(config, "trainer.callbacks", [{"class_path": "my_logs.Logs"}])
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"self\.log") as caught:
        run_command(monkeypatch, "fit", "--config", "given.yaml")
    assert any(frame.path == tmp_path / "my_logs.py" for frame in caught.traceback)


# Checkpoints


@pytest.mark.slow
def test_a_file_that_is_no_checkpoint_is_told(
    tmp_path: Path,
    config: Config,
    agentrl: Command,
) -> None:
    saving = {
        "class_path": "ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path), "filename": "here", "save_weights_only": True},
    }
    assert agentrl(config=changed(config, "trainer.callbacks", [saving]))[0] == 0
    whole = (tmp_path / "here.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "text.ckpt").write_text("no checkpoint, only text\n")
    (tmp_path / "folder.ckpt").mkdir()
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.ckpt")
    for name, reason in (
        ("cut", "cannot be read: it was not saved by agentrl fit, or is damaged"),
        ("empty", "cannot be read: it was not saved by agentrl fit, or is damaged"),
        ("text", "cannot be read: it was not saved by agentrl fit, or is damaged"),
        ("weights", "cannot be read: it was not saved by agentrl fit, or is damaged"),
        ("folder", "cannot be read: Is a directory"),
        ("here", "has weights only, so training cannot continue from it"),
    ):
        path = tmp_path / f"{name}.ckpt"
        message = sentence(agentrl(config=changed(changed(config, "ckpt_path", str(path)), "trainer.max_epochs", 2)))
        assert message.startswith(f"the checkpoint '{path}' {reason} (key ckpt_path; ")


def test_weights_of_another_model_are_counted() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    check_weights({name: weight + 1 for name, weight in own.items()}, own)
    with pytest.raises(CheckpointError) as caught:
        check_weights({"a": torch.zeros(3), "d": torch.zeros(2)}, own)
    assert "it lacks 2 weights such as b, it has 1 more weights such as d, 1 weights have another shape" in str(
        caught.value
    )
    assert "a [3] instead of [2]" in str(caught.value)


# Other processes


@pytest.mark.slow
def test_a_node_that_waits_alone_says_where(agentrl: Command, config: Config) -> None:
    port = str(next_port())
    limit = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"timeout": "0:00:02"}}
    waiting = changed(changed(config, "trainer.strategy", limit), "trainer.num_nodes", 2)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, here):
        message = sentence(agentrl(config=changed(waiting, "trainer.devices", 1)))
    assert f"127.0.0.1:{port}" in message
    assert "trainer.num_nodes" in message
