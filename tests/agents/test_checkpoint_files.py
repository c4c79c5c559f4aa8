"""Checkpoints on disk: damage anywhere is found, and a save that is killed leaves what was there before."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_shares

from lightning_agentrl.agents import checkpoint as files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def content(seed: int = 0) -> dict[str, Any]:
    """Weights, moments and plain types, as a checkpoint has them."""
    random_ = torch.Generator().manual_seed(seed)
    weights = {f"layer.{i}": torch.randn(17, 13, generator=random_) for i in range(6)}
    return {"state_dict": weights, "moments": torch.randn(999, generator=random_), "epoch": seed, "names": ["a", "b"]}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = a.keys() == b.keys() and a["state_dict"].keys() == b["state_dict"].keys()
    return (
        same
        and all(torch.equal(weight, b["state_dict"][name]) for name, weight in a["state_dict"].items())
        and torch.equal(a["moments"], b["moments"])
        and (a["epoch"], a["names"]) == (b["epoch"], b["names"])
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    files.WholeFiles().save_checkpoint(content(), tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As FSDP2 writes it, with its manifest."""
    return sharded(tmp_path / "a.ckpt")


def sharded(path: Path) -> Path:
    whole = content()
    with files.written_whole(path, "") as part:
        save_shares({"state_dict": whole.pop("state_dict"), "moments": whole.pop("moments")}, checkpoint_id=part)
        torch.save(whole, part / "meta.pt")
    return path


def loads_the_same(path: Path) -> bool:
    """Whether torch reads it, and reads what was saved."""
    try:
        return equal(torch.load(path, weights_only=True), content())
    except Exception:  # noqa: BLE001 - of any kind
        return True  # torch finds it itself


def test_a_whole_file_and_a_whole_folder_are_whole(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "file.ckpt")
    sharded(tmp_path / "folder.ckpt")
    for name in ("file.ckpt", "folder.ckpt"):
        assert files.damage(tmp_path / name) == ""
        assert files.is_complete(tmp_path / name)


@pytest.mark.parametrize("size", [1, 64, 4096], ids=["a bit", "64 bytes", "a page"])
def test_damage_anywhere_in_a_file_is_found_or_changes_nothing_that_is_loaded(file: Path, size: int) -> None:
    whole, random_ = file.read_bytes(), random.Random(size)
    for _ in range(150):
        data, at = bytearray(whole), random_.randrange(len(whole))
        if size == 1:
            data[at] ^= 1 << random_.randrange(8)
        else:
            piece = data[at : at + size]
            data[at : at + size] = random_.randbytes(len(piece))
        file.write_bytes(data)
        assert files.damage(file) or loads_the_same(file), at


def test_one_bit_of_a_tensor_is_found_which_torch_does_not_notice(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(content()["moments"].numpy().tobytes()[:64])] ^= 1
    file.write_bytes(data)
    assert not equal(torch.load(file, weights_only=True), content())
    assert "is damaged" in files.damage(file)


def test_a_bit_of_an_archives_directory_is_found_or_changes_nothing_that_is_loaded(file: Path) -> None:
    whole = file.read_bytes()
    first = whole.index(b"PK\x01\x02")
    for at in range(first, len(whole), 3):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        file.write_bytes(data)
        assert files.damage(file) or loads_the_same(file), at


def test_damage_anywhere_in_a_folder_is_found(folder: Path) -> None:
    random_ = random.Random(0)
    inner = [path for path in folder.rglob("*") if path.is_file() and path.name != files.MANIFEST]
    assert {path.name for path in inner} >= {".metadata", "meta.pt", "__0_0.distcp"}
    for path in inner:
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole)
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            path.write_bytes(data)
            assert path.name in files.damage(folder)
        path.write_bytes(whole[:-1])
        assert path.name in files.damage(folder)
        path.unlink()
        assert f"{path.name} is missing" in files.damage(folder)
        path.write_bytes(whole)
    assert files.damage(folder) == ""


@pytest.mark.parametrize("length", [0, 1, 1000, -20, -5000])
def test_a_file_cut_short_is_found(file: Path, length: int) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    assert files.damage(file) == files.NOT_OURS
    assert not files.is_complete(file)


def test_a_folder_takes_the_place_of_another_also_if_it_is_killed_on_the_way(tmp_path: Path) -> None:
    path = sharded(tmp_path / "a.ckpt")
    sharded(path)  # in its place
    assert files.damage(path) == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
    shutil.copytree(path, files.part_of(path))
    (path / "meta.pt").unlink()  # as it is killed while it removes the old one
    assert files.exists(path)
    files.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
    assert files.damage(path) == ""


def test_leftovers_are_removed_an_hour_later_since_another_run_may_be_saving(file: Path) -> None:
    part = files.part_of(file)
    part.write_text("half")
    files.clean(file.parent)
    assert part.exists()
    os.utime(part, (time.time() - 2 * files.LEFT_SECONDS,) * 2)
    files.clean(file.parent)
    assert not part.exists()
    assert file.exists()


def test_what_is_no_leftover_of_a_save_stays(file: Path) -> None:
    """A run may go on from a checkpoint among other files."""
    others = ["a.ckpt.old", "film.mkv.part", "notes.txt", "notes.txt.old", "paper.pdf.old"]
    for name in others:
        (file.parent / name).write_text(name)
        os.utime(file.parent / name, (0, 0))
    files.clean(file.parent)
    assert sorted(p.name for p in file.parent.iterdir()) == ["a.ckpt", *others]
    assert all((file.parent / name).read_text() == name for name in others)


def save_for_ever(path: Path) -> None:
    for epoch in range(1, 10_000):
        files.WholeFiles().save_checkpoint({"epoch": epoch, "weights": torch.full((300_000,), float(epoch))}, path)


def test_whenever_saving_is_killed_there_is_a_whole_checkpoint(tmp_path: Path) -> None:
    path, random_, halves = tmp_path / "a.ckpt", random.Random(0), 0
    for _ in range(10):
        path.unlink(missing_ok=True)
        saver = os.fork()
        if not saver:
            try:
                save_for_ever(path)
            finally:
                os._exit(1)
        try:
            ends = time.monotonic() + 60
            while not path.exists():
                assert time.monotonic() < ends
                time.sleep(0.001)
            time.sleep(random_.random() * 0.03)
        finally:
            os.kill(saver, signal.SIGKILL)
            os.waitpid(saver, 0)
        assert files.damage(path) == ""
        assert torch.load(path, weights_only=True)["epoch"] >= 1
        halves += files.part_of(path).exists()
    assert halves  # some were killed while they wrote
    files.WholeFiles().save_checkpoint({"epoch": 1}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_newest_is_the_one_written_last_and_halves_do_not_count(tmp_path: Path) -> None:
    assert files.newest_of([tmp_path / "nowhere"]) is None
    for number, name in enumerate(("b", "a", "half")):
        torch.save(content(number), tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", ns=(number, number))
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "half.ckpt").read_bytes()[:500])
    (tmp_path / "last.ckpt").symlink_to("b.ckpt")
    assert files.checkpoints_in(tmp_path) == [tmp_path / "b.ckpt", tmp_path / "a.ckpt"]
    assert json.loads((sharded(tmp_path / "c.ckpt") / files.MANIFEST).read_text()).keys() >= {"meta.pt", ".metadata"}
    assert files.newest_of([tmp_path]) == tmp_path / "c.ckpt"
