"""The command for GPU figures: parts end in time, are skipped on record, and run again for other code."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import gpu_figures
from benchmarks.gpu_figures import Part, measure, run
from benchmarks.speed.layouts import Case
from benchmarks.speed.utilisation import sizes_of, step_flops
from tests.engines.servers import is_running


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "WORK", tmp_path / "work")


def part(script: str, name: str = "one", seconds: float = 10.0, needs: tuple[str, ...] = ()) -> Part:
    return Part(name, name, seconds, ("bash", "-c", script), needs=needs)


def measured(tmp_path: Path, *chosen: Part, machine: str = "1 × GPU", minutes: float = 10.0) -> dict[str, dict]:
    """Return the records after a run."""
    file = tmp_path / "gpu.json"
    measure(chosen, [""], machine, file, time.monotonic() + 60 * minutes)
    return json.loads(file.read_text())


def test_part_on_record_is_skipped_until_code_or_machine_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = part(f'echo x >> {tmp_path}/count; echo "{{\\"runs\\": $(wc -l < {tmp_path}/count)}}"')
    runs = lambda **more: measured(tmp_path, counts, **more)["one"]["figures"]["runs"]  # noqa: E731
    assert [runs(), runs()] == [1, 1]
    assert runs(machine="2 × GPU") == 2
    monkeypatch.setattr(gpu_figures, "SOURCES", ("setup.py",))
    assert runs(machine="2 × GPU") == 3
    page = (tmp_path / "gpu.md").read_text()
    assert "runs 3" in page
    assert "runs 2" not in page


def test_failed_part_runs_again_after_parts_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flaky = part(f"test -e {tmp_path}/well && echo '{{\"x\": 1.5}}' || {sys.executable} -c '1 / 0'")
    records = measured(tmp_path, flaky, part("echo nothing", "two"))
    assert records["one"]["failed"] == "ZeroDivisionError: division by zero"
    assert "figures" not in records["two"]
    (tmp_path / "well").touch()
    capsys.readouterr()
    records = measured(tmp_path, flaky, part("echo '{}'", "three"))
    assert records["one"]["figures"] == {"x": 1.5}
    assert "failed" not in records["one"]
    printed = capsys.readouterr().out
    assert printed.index("three: ") < printed.index("one: ")


def test_part_is_stopped_at_its_limit_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    record = run(part(f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/child; wait"), tmp_path, limit=0.5)
    assert record["failed"].startswith("stopped after")
    assert time.monotonic() - began < 60
    pid = int((tmp_path / "child").read_text())
    while is_running(pid):
        time.sleep(0.05)


@pytest.mark.parametrize("shared", [0, 4])
def test_operations_of_a_step_are_those_that_torch_counts(tiny_folder: Path, shared: int) -> None:
    """Except for attention, since eager attention computes pairs that nobody attends to, and shared tokens."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    ids = torch.arange(3 * 7).view(3, 7)
    with FlopCounterMode(display=False) as counter:
        lm(ids, use_cache=False).logits.sum().backward()
    sizes = sizes_of(str(tiny_folder))
    every_pair, attended = 7 * 7, 7 * 8 // 2
    more = 3 * 3 * 4 * sizes.attention * (every_pair - attended)
    case = Case(prompt=1, shared=0, reply=7)
    assert step_flops(sizes, case, rows=3) == counter.get_total_flops() - more
    if shared:
        apart, together = Case(5, 0, 3), Case(5, shared, 3)
        pairs = shared * (shared + 1) // 2
        saved = 2 * (sizes.linear - sizes.last) * shared + 4 * sizes.attention * pairs
        assert step_flops(sizes, apart, 3) - step_flops(sizes, together, 3) == 3 * 2 * saved
