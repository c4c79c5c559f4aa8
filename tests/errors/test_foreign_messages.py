"""What other libraries say in prose: every pattern is provoked by the one who says it."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_agentrl.commands.guarded import lost_process
from lightning_agentrl.errors.foreign_messages import disk_full, not_plain, out_of_memory
from lightning_agentrl.errors.problem import first_line
from tests.started import outcomes


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize("call", [lambda: torch.empty(2**48), lambda: np.empty(2**48), lambda: bytearray(2**62)])
def test_memory_that_runs_out_on_a_cpu(call: Callable[[], object]) -> None:
    assert out_of_memory(raised(call)) == "CPU"


@pytest.mark.gpu
def test_memory_that_runs_out_on_a_gpu() -> None:
    assert out_of_memory(raised(lambda: torch.empty(2**48, device="cuda"))) == "GPU"


def test_other_errors_are_not_about_memory_or_disk() -> None:
    for bug in (raised(lambda: torch.zeros(2) @ torch.zeros(3)), raised(lambda: {}["x"])):
        assert not out_of_memory(bug)
        assert not disk_full(bug)


def test_a_full_disk_is_told_by_torch_without_a_reason() -> None:
    error = raised(lambda: torch.save(torch.zeros(100_000), "/dev/full"))
    assert disk_full(error)
    assert getattr(error, "errno", None) != errno.ENOSPC


def test_what_torch_does_not_read_from_a_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"a": np.float64(1)}, tmp_path / "saved")
    assert not_plain(raised(lambda: torch.load(tmp_path / "saved", weights_only=True))).startswith("numpy.")
    (tmp_path / "saved").write_bytes(b"no checkpoint")
    assert not_plain(raised(lambda: torch.load(tmp_path / "saved", weights_only=True))) == ""


# gloo


def reduce_with(rank: int, folder: Path, other: str) -> None:
    """Reduce on one of two processes, of which the second ends or hangs."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    dist.barrier()
    if rank == 1:
        if other == "hangs":
            time.sleep(8)
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("other", "what"), [("ends", r"at [\d.]+ has ended"), ("hangs", "did not answer in time")])
def test_a_process_that_gloo_lost_is_reported(tmp_path: Path, other: str, what: str) -> None:
    (_, output), _ = outcomes(2, reduce_with, tmp_path, other, folder=tmp_path, seconds=120)
    saved, unsaved = (lost_process(RuntimeError(output), saved) for saved in (True, False))
    assert saved is not None, output
    assert unsaved is not None
    assert re.fullmatch(f"another process of this run {what}", saved.what)
    assert "continue with --ckpt_path last" in saved.fix
    assert "start again" in unsaved.fix


def test_timeouts_are_a_lost_process_only_if_gloo_reports_them() -> None:
    """Gloo does not always name itself, as when the time limit passed before the operation was waited for."""
    assert lost_process(RuntimeError("Application timeout caused pair closure"), saved=True) is not None
    for other in (RuntimeError("a timeout of something else"), ValueError("gloo Timed out waiting 2000ms for recv")):
        assert lost_process(other, saved=True) is None


def test_the_first_line_of_an_error_is_one_with_words():
    """Transformers begins some sentences, such as that of a missing package, with an empty line."""
    assert first_line(ImportError("\n A package is missing.\nInstall it.")).strip() == "A package is missing."
    assert first_line(ImportError(" \n")) == "ImportError"
