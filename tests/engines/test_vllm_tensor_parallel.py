"""Processes that share one vLLM sample what one process samples, each for its own environments."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from torch.multiprocessing.spawn import start_processes

from lightning_agentrl.engines import VLLMEngine
from tests.cli import Command, Config, changed, sentence
from tests.engines import shared_vllm
from tests.engines.shared_vllm import adapted, episodes, parts, updates
from tests.engines.test_vllm_engine import handle_of, policy_of
from tests.engines.test_vllm_runs import played, run

pytestmark = pytest.mark.vllm


def processes(folder: Path, model: Path, world: int, size: int) -> list[dict[str, Any]]:
    """What each process says."""
    before = set(memory_names())
    multiprocessing.get_context("forkserver").set_forkserver_preload([shared_vllm.__name__])  # imports once
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        start_processes(
            shared_vllm.run, args=(str(folder), str(model), world, size), nprocs=world, start_method="forkserver"
        )
    assert set(memory_names()) <= before
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def memory_names() -> list[str]:
    """Of the memory that processes with vLLM share on a CPU."""
    return [path.name for path in Path("/dev/shm").glob("*cpushm*")]


@pytest.fixture(scope="module")
def reports(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes(tmp_path_factory.mktemp("ranks"), served_folder, world=2, size=2)


@pytest.fixture(scope="module")
def alone(served_folder: Path) -> dict[str, Any]:
    """What one process says that has the engine for itself."""
    policy, engine = policy_of(served_folder), VLLMEngine(kv_cache_gb=0.05)
    engine.start(handle_of(policy))
    one: dict[str, Any] = {"parts": engine._thread.call(parts), "updates": updates(engine, policy)}
    one["episodes"] = [asyncio.run(episodes(engine, rank)) for rank in range(2)]
    engine.stop()
    policy = adapted(policy_of(served_folder))
    engine.start(handle_of(policy))
    one["adapters"] = updates(engine, policy)
    engine.stop()
    return one


def together(reports: list[dict[str, Any]], kind: str) -> list[list[dict[str, Any]]]:
    """Replies of all processes in the order of the requests, by weights."""
    by_version = zip(*(process[kind] for process in reports), strict=True)
    return [[line for lines in itertools.zip_longest(*ranks) for line in lines if line] for ranks in by_version]


def test_each_process_has_a_half_of_the_weights(reports, alone):
    for process in reports:
        assert process["parts"] == {name: count // 2 for name, count in alone["parts"].items()}
    assert alone["parts"]["shared heads"] == 2


@pytest.mark.parametrize("kind", ["updates", "adapters"])
def test_replies_are_those_of_one_process_before_and_after_updates(reports, alone, kind):
    """The same tokens from the same seeds; log-probs are the trainer's, and equal up to rounding."""
    shared = together(reports, kind)
    assert len(shared) == len(alone[kind]) == shared_vllm.VERSIONS
    for version, (ours, theirs) in enumerate(zip(shared, alone[kind], strict=True)):
        assert [line["ids"] for line in ours] == [line["ids"] for line in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a["logps"] == pytest.approx(b["logps"], abs=2e-4)
            assert a["gap"] < 2e-4
            assert a["version"] == version
    ids = [[line["ids"] for line in lines] for lines in shared]
    assert ids[0] != ids[1] != ids[2]


def test_processes_with_more_and_with_less_to_do_end_together(reports, alone):
    assert [process["episodes"] for process in reports] == alone["episodes"]
    assert [sum(map(len, envs)) for envs in alone["episodes"]] == [18, 1]


def test_a_request_that_is_taken_back_is_so_in_both(reports):
    """Its 390 tokens would be as many steps."""
    for process in reports:
        assert 1 < process["taken back after"] < 100


def test_nothing_turns_fast_while_all_wait_for_environments(reports):
    """Half a second, and a look at the other process every 5 ms."""
    for process in reports:
        assert 1 < process["idle"] < 130


def test_what_would_part_the_processes_is_refused(reports):
    for process in reports:
        assert "inside collecting() only" in process["outside"]
        assert "still being sampled" in process["within"]


def test_other_numbers_of_processes_and_models_that_cannot_be_cut_are_refused(reports):
    for process in reports:
        assert "tensor_parallel 3 needs a multiple of 3 processes, got 2" in process["three"]
        assert "tensor_parallel 2 does not divide the model: 3 attention heads" in process["heads"]


def test_an_error_in_one_process_reaches_the_other(reports):
    assert reports[1]["fails"] == "ZeroDivisionError: a bug of the environment"
    assert reports[0]["fails"] == (
        "RuntimeError: rank 1, which holds a part of vLLM's weights, has stopped "
        "(ZeroDivisionError: a bug of the environment)"
    )
    for process in reports:
        assert process["after"].startswith("RuntimeError: ")
        assert "a bug of the environment" in process["after"]


def test_a_process_that_dies_is_told_by_the_other(reports):
    assert reports[0]["dies"].startswith("RuntimeError: the ranks that share vLLM's weights cannot be reached")


@pytest.mark.long
def test_groups_of_processes_do_not_wait_for_each_other(served_folder, alone, tmp_path):
    """Two groups of two; the second is done while the first plays on."""
    reports = processes(tmp_path, served_folder, world=4, size=2)
    for ours, theirs in zip(together(reports, "updates"), alone["updates"], strict=True):
        assert [line["ids"] for line in ours] == [line["ids"] for line in theirs]
        assert max(line["gap"] for line in ours) < 2e-4
    assert [process.get("episodes") for process in reports] == [*alone["episodes"], None, None]


# Through the command that a user types


def shared(config: Config, folder: Path, strategy: Any = "ddp") -> Config:
    config = changed(config, "data.init_args.engine.init_args.tensor_parallel", 2)
    config["trainer"] |= {"devices": 2, "strategy": strategy, "default_root_dir": str(folder)}
    return config


FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(FSDP2, id="fsdp2")])
def test_two_processes_sample_from_what_is_trained(vllm_config: Config, tmp_path: Path, strategy: Any) -> None:
    assert gap_of(shared(vllm_config, tmp_path, strategy), tmp_path) < 3e-4


def gap_of(config: Config, folder: Path) -> float:
    """The largest, as `agentrl verify-engine` says it."""
    done = run(config, folder, "verify-engine")
    out, _ = done.communicate(timeout=500)
    assert done.returncode == 0, out[-3000:]
    (last,) = [line for line in out.splitlines() if line.startswith("gap_max=")]
    assert last.endswith(" ok")
    return float(last.split()[0].removeprefix("gap_max="))


@pytest.mark.long
def test_a_real_model_is_shared_by_three_processes(tmp_path: Path) -> None:
    """The demo model, whose 9 attention heads no two processes can share."""
    config = yaml.safe_load((Path(__file__).parents[2] / "configs" / "quickstart_vllm.yaml").read_text())
    config["data"]["init_args"] |= {"num_envs": 6, "turns_per_env": 2, "mini_batch_turns": 6}
    config["data"]["init_args"]["engine"]["init_args"] |= {"kv_cache_gb": 0.1, "tensor_parallel": 3}
    config["trainer"] |= {"devices": 3, "strategy": "ddp", "precision": "32-true", "default_root_dir": str(tmp_path)}
    assert gap_of(config, tmp_path) < 3e-4


def test_a_run_of_two_processes_is_that_of_one(vllm_run: Config, vllm_played: Path, tmp_path: Path) -> None:
    """Turn by turn, over three iterations with updates between them."""
    done = run(shared(vllm_run, tmp_path / "two"), tmp_path)
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 0, out[-3000:]
    assert len(played(vllm_played)) == 3 * 8
    assert played(tmp_path / "two") == played(vllm_played)


BROKEN = """
import os

import gymnasium
from agentrl_envs.games.bandit import Bandit


class Broken(Bandit):
    def _act(self, action):
        if os.environ["LOCAL_RANK"] == "1":
            raise ZeroDivisionError("a bug of the environment")
        return super()._act(action)


gymnasium.register("Broken-v0", Broken)
"""


@pytest.mark.long
def test_an_environment_that_breaks_in_one_process_ends_both(vllm_run: Config, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    env = {"id": "broken:Broken-v0", "retries": 0}
    done = run(changed(shared(vllm_run, tmp_path / "run"), "data.init_args.env", env), tmp_path)
    out, _ = done.communicate(timeout=300)
    assert done.returncode not in (0, None)
    assert "ZeroDivisionError: a bug of the environment" in out


def test_one_process_alone_is_refused(vllm_config: Config, agentrl: Command) -> None:
    asked = sentence(agentrl(config=changed(vllm_config, "data.init_args.engine.init_args.tensor_parallel", 2)))
    assert asked.startswith("data.init_args.engine.init_args.tensor_parallel 2 needs a multiple of 2 processes, got 1")
