"""Nothing in a checkpoint folder executes code, whoever unpickles its files: we, torch, Lightning or DeepSpeed."""

from __future__ import annotations

import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.state_dict_loader import load as load_shares
from torch.distributed.checkpoint.state_dict_saver import save as save_shares

from lightning_agentrl.agents.checkpoint import guard_checkpoints, refuse_unsound_folder, write_manifest
from lightning_agentrl.agents.checkpoint_code import read_metadata
from lightning_agentrl.callbacks.run_checkpoints import CheckpointedTrainer
from lightning_agentrl.errors import CheckpointError
from tests.agents.harness import make_trainer
from tests.cli import Command, Config, changed, sentence

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 1, "save_distributed_checkpoint": True},
}
NAMED = r"posix\.system|No such file"
IN_META = {"epoch": 1, "agent": {"format": 1, "model": "demo", "lora": None}, "pytorch-lightning_version": "2.6.0"}


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def sound(path: Path) -> Path:
    save_shares({"state_dict": {"actor.a": torch.ones(2)}, "rates": {"lr": 0.1}}, checkpoint_id=path)
    torch.save(IN_META, path / "meta.pt")
    return path


def code_in_metadata(path: Path, code: Code) -> None:
    (sound(path) / ".metadata").write_bytes(pickle.dumps(code))


def code_in_metadata_of_a_rank(path: Path, code: Code) -> None:
    """Torch reads it if the file of all ranks cannot be read."""
    (sound(path) / "__0.metadata").write_bytes(pickle.dumps(code))
    (path / ".metadata").unlink()


def code_in_a_share(path: Path, code: Code) -> None:
    save_shares({"state_dict": {"actor.a": torch.ones(2)}, "rates": {"lr": code}}, checkpoint_id=path)
    torch.save(IN_META, path / "meta.pt")


def code_in_meta_pt(path: Path, code: Code) -> None:
    torch.save(IN_META | {"callbacks": code}, sound(path) / "meta.pt")


def code_of_zero(path: Path, code: Code) -> None:
    (path / "checkpoint").mkdir(parents=True)
    torch.save(IN_META | {"module": {"actor.a": torch.ones(2)}}, path / "checkpoint" / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": code}, path / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


EVIL = [code_in_metadata, code_in_metadata_of_a_rank, code_in_a_share, code_in_meta_pt, code_of_zero]


def seal(path: Path) -> None:
    """Write the right checksums, as whoever changes a file can."""
    write_manifest(path)


def read_by_libraries(checkpoint: str, **kwargs: Any) -> dict[str, Any]:
    """Read a folder as Lightning's strategies and DeepSpeed do."""
    path = Path(checkpoint)
    for file in path.glob("checkpoint/*.pt"):
        torch.load(file, weights_only=False)
    if path.joinpath("meta.pt").exists():
        load_shares({"state_dict": {"actor.a": torch.zeros(2)}, "rates": {"lr": 0.0}}, checkpoint_id=path)
        return cast(dict[str, Any], torch.load(path / "meta.pt", **kwargs))
    return {}


@pytest.mark.parametrize("sealed", [False, True], ids=["bare", "sealed"])
@pytest.mark.parametrize("write", EVIL)
def test_loading_a_folder_with_code_is_refused(write: Any, sealed: bool, tmp_path: Path, marker: Path) -> None:
    write(tmp_path / "evil.ckpt", Code(marker))
    if sealed:
        seal(tmp_path / "evil.ckpt")
    """By the plugin, and by the trainer before a strategy reads it past the plugin."""
    trainer = make_trainer(tmp_path, 1)
    guard_checkpoints(trainer)
    with pytest.raises(CheckpointError, match=NAMED):
        trainer.strategy.load_checkpoint(str(tmp_path / "evil.ckpt"), weights_only=None)
    for start in (CheckpointedTrainer.fit, CheckpointedTrainer.validate):
        with pytest.raises(CheckpointError, match=NAMED):
            start(CheckpointedTrainer(logger=False), L.LightningModule(), ckpt_path=str(tmp_path / "evil.ckpt"))
    assert not marker.exists()
    with suppress(Exception, CheckpointException):  # after the code has run
        read_by_libraries(str(tmp_path / "evil.ckpt"), weights_only=False)
    assert marker.exists()  # without the checks it is executed


def test_loading_a_sound_folder_reads_it(tmp_path: Path) -> None:
    refuse_unsound_folder(sound(tmp_path / "a.ckpt"))
    assert read_by_libraries(str(tmp_path / "a.ckpt"), weights_only=True) == IN_META


def test_metadata_with_members_of_enums_by_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python pickled them so before 3.11.4."""
    by_name = lambda self, protocol: (getattr, (type(self), self._name_))  # noqa: E731
    monkeypatch.setattr(of_torch._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    file = sound(tmp_path / "a.ckpt") / ".metadata"
    assert b"getattr" in file.read_bytes()
    assert read_metadata(file) == pickle.loads(file.read_bytes())


@pytest.mark.parametrize("sealed", [False, True], ids=["bare", "sealed"])
@pytest.mark.parametrize("write", EVIL)
def test_exporting_a_folder_with_code_is_refused(
    write: Any, sealed: bool, tmp_path: Path, marker: Path, agentrl: Command
) -> None:
    write(tmp_path / "evil.ckpt", Code(marker))
    if sealed:
        seal(tmp_path / "evil.ckpt")
    assert re.search(NAMED, sentence(agentrl("evil.ckpt", "out", command="export")))
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("sealed", [False, True], ids=["bare", "sealed"])
@pytest.mark.parametrize("strategy", ["auto", FSDP2], ids=["one process", "FSDP2"])
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_no_command_continues_from_a_folder_with_code(
    command: str, strategy: Any, sealed: bool, tmp_path: Path, marker: Path, config: Config, agentrl: Command
) -> None:
    code_in_metadata(tmp_path / "evil.ckpt", Code(marker))
    if sealed:
        seal(tmp_path / "evil.ckpt")
    config = changed(config, "trainer.strategy", strategy)
    code, printed = agentrl("--ckpt_path", "evil.ckpt", config=config, command=command)
    assert code == 2
    assert "the checkpoint 'evil.ckpt' cannot be read: it holds an object of posix.system" in printed
    assert not marker.exists()
