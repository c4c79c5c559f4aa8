"""Whole runs with vLLM: two processes, a run that is repeated, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.agents.processes import run_ranks
from tests.cli import Config, changed, fit

pytestmark = pytest.mark.vllm


def played(folder: Path) -> list[dict[str, Any]]:
    """What was said and earned in each turn, in the order of environments."""
    lines = [json.loads(line) for path in sorted(folder.rglob("turns/*.jsonl")) for line in path.open()]
    kept = ("iteration", "env", "episode", "turn", "observation", "reply_ids", "action", "reward")
    turns = [{key: line[key] for key in kept} for line in lines]
    return sorted(turns, key=lambda turn: (turn["iteration"], turn["env"], turn["episode"], turn["turn"]))


def test_a_run_can_be_repeated(
    vllm_run: Config, vllm_played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process after the other run, whose engine was stopped."""
    fit(changed(vllm_run, "trainer.default_root_dir", str(tmp_path)), tmp_path, monkeypatch)
    first, second = played(vllm_played), played(tmp_path)
    assert len(first) == 3 * 8
    assert len({tuple(turn["reply_ids"]) for turn in first}) > 4
    assert first == second


def test_two_processes_have_an_engine_each(vllm_run: Config, tmp_path: Path) -> None:
    vllm_run["trainer"]["max_epochs"] = 2
    check_two_processes(vllm_run, tmp_path)


def check_two_processes(given: Config, folder: Path) -> None:
    """Two iterations, in which each process has two of the environments."""
    given["trainer"] |= {"devices": 2, "strategy": "ddp", "default_root_dir": str(folder / "run")}
    (folder / "given.yaml").write_text(yaml.safe_dump(given))
    run_ranks(folder, ["fit", "--config", "given.yaml"], 2)
    turns = played(folder / "run")
    assert {turn["env"] for turn in turns} == {0, 1, 2, 3}
    assert len(turns) == 2 * 8


def test_ctrl_c_ends_it_with_one_line(vllm_run: Config, tmp_path: Path) -> None:
    """While replies are sampled; no thread of vLLM aborts the process as it exits."""
    vllm_run["trainer"]["max_epochs"] = 100000
    vllm_run["data"]["init_args"]["interaction"]["init_args"]["max_reply_tokens"] = 200
    vllm_run["trainer"]["default_root_dir"] = str(tmp_path / "run")
    done = run(vllm_run, tmp_path)
    end = time.monotonic() + 300
    while not list((tmp_path / "run").rglob("turns/*.jsonl")):  # the first rollout is there
        assert done.poll() is None, done.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.2)
    done.send_signal(signal.SIGINT)
    try:
        out, _ = done.communicate(timeout=120)
    finally:
        done.kill()  # does nothing to one that has ended
    assert done.returncode == 130, out[-3000:]
    assert "Traceback" not in out
    assert "agentrl: stopped after iteration " in out


def run(given: Config, folder: Path, command: str = "fit") -> subprocess.Popen[str]:
    (folder / "given.yaml").write_text(yaml.safe_dump(given))
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_agentrl", command, "--config", "given.yaml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
