"""SmolLM2 in float32, as users start it: both engines of vLLM sample from what is trained, after two updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_agentrl.commands import verify_engine
from lightning_agentrl.metrics.mismatch import EXACT
from tests.cli import Config, Verify, judged
from tests.engines.servers import ROOT, ServerProcess

pytestmark = pytest.mark.vllm

BOUND = EXACT.largest


@pytest.fixture(autouse=True)
def few_rounds_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This model is large enough for two threads, and so large that each round takes ten seconds."""
    monkeypatch.setattr(verify_engine, "ROUNDS", 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", str(200 * 2**20), "--max-model-len", "1024")
    server = ServerProcess(Path("demo"), tmp_path_factory.mktemp("demo") / "server.log", options)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def shipped(name: str, tmp_path: Path) -> Config:
    config: Any = yaml.safe_load((ROOT / "configs" / name).read_text())
    config["trainer"] |= {"precision": "32-true", "default_root_dir": str(tmp_path)}
    config["model"]["init_args"]["temperature"] = 0.8
    return config


def check(result: tuple[int, list[str]]) -> None:
    code, lines = result
    largest, _, judgement = judged(lines)
    assert (code, judgement) == (0, "ok")
    assert 0 < largest < BOUND


def test_vllm_samples_from_what_is_trained(verify: Verify, tmp_path: Path) -> None:
    check(verify(shipped("quickstart_vllm.yaml", tmp_path)))


@pytest.mark.long
def test_a_server_samples_from_what_is_trained(verify: Verify, server: ServerProcess, tmp_path: Path) -> None:
    config = shipped("quickstart_vllm_server.yaml", tmp_path)
    config["data"]["init_args"]["engine"]["init_args"]["urls"] = [server.url]
    check(verify(config))
