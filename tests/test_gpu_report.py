"""The report on a machine's GPUs: parts end in time, are kept, and what could not be measured is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu_report import host_reads, runner
from benchmarks.gpu_report.host_reads import HostReads
from benchmarks.gpu_report.page import NONE_YET, page
from benchmarks.gpu_report.parts import Machine, config_for, count_of_tests, parts_for
from benchmarks.gpu_report.runner import Outcome, Part, outcome_of, run_parts
from benchmarks.gpu_report.utilisation import sizes_of, step_flops
from lightning_agentrl.models import flex
from lightning_agentrl.models.prefix_tree import lay_out
from tests.engines.servers import is_running

ROOT = Path(__file__).parents[1]


def part(script: str, name: str = "one", minutes: float = 1.0) -> Part:
    """A shell script whose figures are the file that it writes."""
    return Part(
        name,
        name,
        ("bash", "-c", script),
        minutes,
        lambda folder: (folder / "figures").read_text().strip(),
        variables={},
    )


def ran(tmp_path: Path, *parts: Part, machine: str = "this") -> dict[str, tuple[str, str]]:
    """How each ended and what is told of it; the script finds its folder's name in $AT."""
    placed = [replace(p, variables={"AT": str(tmp_path / p.name)}) for p in parts]
    outcomes = run_parts(placed, tmp_path, machine, "abc", lambda: None)
    return {name: (outcome.ended, outcome.told) for name, outcome in outcomes.items()}


def test_a_part_with_figures_is_kept_until_its_command_or_the_machine_is_another(tmp_path: Path) -> None:
    counts = part(f"echo x >> {tmp_path}/count; wc -l < {tmp_path}/count > $AT/figures")
    assert ran(tmp_path, counts) == {"one": ("done", "1")}
    assert ran(tmp_path, counts) == {"one": ("done", "1")}
    assert ran(tmp_path, counts, machine="other") == {"one": ("done", "2")}
    assert ran(tmp_path, replace(counts, command=(*counts.command, "more")), machine="other") == {"one": ("done", "3")}
    (tmp_path / "one" / "outcome.json").write_text('{"ended": "do')  # half-written
    assert ran(tmp_path, counts) == {"one": ("done", "4")}


def test_what_failed_says_why_and_is_tried_again_and_the_others_run(tmp_path: Path) -> None:
    flaky = part(
        f"{sys.executable} -c '1 / 0'; echo 'leaked something'; test -e {tmp_path}/well && echo 5 > $AT/figures"
    )
    silent = part("true", "two")
    hindered = replace(part("echo 1 > $AT/figures", "three"), hindrance=lambda: "needs two GPUs")
    last = part("echo 7 > $AT/figures", "four")
    outcomes = ran(tmp_path, flaky, silent, hindered, last)
    assert outcomes["one"] == ("failed", "ZeroDivisionError: division by zero")
    assert outcomes["two"][0] == "failed"
    assert outcomes["three"] == ("cannot", "needs two GPUs")
    assert outcomes["four"] == ("done", "7")
    (tmp_path / "well").touch()
    assert ran(tmp_path, flaky)["one"] == ("done", "5")


def test_a_part_that_takes_too_long_is_ended_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not want to, and one that only its child goes on for."""
    monkeypatch.setattr(runner, "LAST_WORDS", 0.2)
    stubborn = part(f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/child; echo half way; wait; wait", minutes=0.005)
    began = time.monotonic()
    ended, why = ran(tmp_path, stubborn)["one"]
    assert ended == "late"
    assert "half way" in why
    assert time.monotonic() - began < 60
    left = part(f"sleep 300 & echo $! > {tmp_path}/other; echo 1 > $AT/figures", "two")
    assert ran(tmp_path, left)["two"] == ("done", "1")
    for name in ("child", "other"):
        pid, end = int((tmp_path / name).read_text()), time.monotonic() + 30
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(pid)


def outcome(ended: str, told: str) -> Outcome:
    return Outcome(ended, told, 60.0, [], "2026-01-01T00:00", "abc")  # type: ignore[arg-type]


def test_the_page_has_every_part_and_what_was_told_of_it(tmp_path: Path) -> None:
    for machine in (Machine(), Machine(("GPU 1",), int(80e9)), Machine(("A", "B"), int(80e9), random_models=True)):
        parts = parts_for(machine, tmp_path)
        every = [p for _, of_heading in parts for p in of_heading]
        assert len({p.name for p in every}) == len(every)
        outcomes = {"tests": outcome("failed", "1 failed | 3 passed"), "trl": outcome("cannot", "no network")}
        text = page(machine, {"torch": "2"}, parts, outcomes)
        rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| part ")]
        assert len(rows) == len(every)
        assert all(any(row.startswith(f"| {p.title} | ") for row in rows) for p in every)
        assert "**failed**: 1 failed \\| 3 passed" in text
        assert text.count("not run yet") == len(every) - 2
        assert ("none of these figures" in text.lower()) is (not machine.gpus)


def test_the_page_of_the_repository_is_of_a_gpu_or_says_that_there_was_none() -> None:
    text = (ROOT / "docs" / "results" / "gpu.md").read_text()
    assert "tiny random model" not in text
    if NONE_YET in text:
        machine = Machine(("any",), int(141e9))
        assert text == page(machine, {}, parts_for(machine, Path("runs")), {})


@pytest.mark.parametrize(
    ("count", "memory", "expected"),
    [(1, 141e9, "3b"), (4, 48e9, "3b_4gpus"), (1, 80e9, "3b_lora"), (1, 16e9, None), (8, 141e9, "3b")],
)
def test_the_config_of_3b_is_one_that_fits(count: int, memory: float, expected: str | None) -> None:
    found = config_for("3B", Machine(("GPU",) * count, int(memory)))
    assert found == (f"babyai_goto_qwen2.5-{expected}" if expected else None)
    assert found is None or (ROOT / "configs" / f"{found}.yaml").exists()


def test_operations_of_a_step_are_those_that_torch_counts(tiny_folder: Path) -> None:
    """But for attention, of which the attended pairs are meant, and eager attention computes all."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    ids = torch.arange(3 * 7).view(3, 7)
    with FlopCounterMode(display=False) as counter:
        lm(ids, use_cache=False).logits.sum().backward()
    sizes = sizes_of(str(tiny_folder))
    every_pair, attended = 7 * 7, 7 * 8 // 2
    more = 3 * 3 * 4 * sizes.attention * (every_pair - attended)
    assert step_flops(sizes, rows=3, tokens=7, scored=7) == counter.get_total_flops() - more


@pytest.mark.long  # to compile takes long; tests/models/test_tree_attention.py does so in CI
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_flex_attention_is_compiled_while_reads_are_counted() -> None:
    """As it reads the prompts on a GPU."""
    tree = lay_out([(1, 2, 3), (1, 2, 4, 5, 6)]).tree
    query, key, value = torch.randn(3, 1, 2, len(tree.ends), 16)
    with HostReads() as reads, torch.no_grad():
        out = flex.flex_tree_attention(query, key, value, tree.block_mask(), 0.3)
        float(out.sum())
    expected = scaled_dot_product_attention(query, key, value, attn_mask=tree.mask(), scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    assert reads.counts == {"aten::_local_scalar_dense": 1}


@pytest.mark.gpu
def test_reads_are_counted_on_a_gpu(served_folder: Path) -> None:
    found = host_reads.measure(str(served_folder), "cuda", replies=4, tokens=8)
    assert found["tokens"] == 32
    assert found["reads_per_token"] > 0
    assert found["waits_per_token"] > 0


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("46 passed, 2 skipped in 14.63s\nnanobind: leaked 3 types!", "46 passed, 2 skipped in 14.63s"),
        ("== 1 failed, 45 passed in 62.05s (0:01:02) ==", "1 failed, 45 passed in 62.05s (0:01:02)"),
        ("78 deselected in 3.10s", None),
        ("", None),
    ],
)
def test_tests_are_counted_whatever_is_said_as_their_process_ends(tmp_path: Path, said: str, count: str | None) -> None:
    (tmp_path / "log.txt").write_text(f".....\n{said}\n")
    if count is None:
        with pytest.raises(ValueError, match="nothing passed"):
            count_of_tests(tmp_path, gpu=True)
    else:
        assert count_of_tests(tmp_path, gpu=True) == count


@pytest.mark.long
def test_the_quickest_parts_end_to_end(tmp_path: Path) -> None:
    """A trial on the CPU, twice: the second time nothing is measured again."""
    command = [sys.executable, "benchmarks/gpu_report/run.py", "--folder", str(tmp_path)]
    command += ["--only", "model-0.5B", "host-reads", "weights-nccl"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    first, second = (
        subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=300) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr
    text = (tmp_path / "cpu" / "page.md").read_text()
    assert "values read by the host per token" in text
    assert "did not run: needs two GPUs" in text
    assert second.stdout.count(": kept, ") == 2
    log = (tmp_path / "cpu" / "host-reads" / "log.txt").read_text().splitlines()
    record = json.loads(log[-1])
    assert record["tokens"] == 64
    assert 0 < sum(record["reads"].values()) < record["tokens"]  # no token is read alone
    kept = outcome_of(part("", "host-reads"), tmp_path / "cpu")
    assert kept is not None
    assert kept.ended == "done"
