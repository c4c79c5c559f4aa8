"""A vLLM server on a GPU of its own gets weights from the trainer's by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_agentrl.engines import VLLMServerEngine
from tests.engines.servers import ServerProcess
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, serve, trained_logps
from tests.engines.test_vllm_gpu import TF32
from tests.moving import move

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
OPTIONS = ("--dtype", "float32", "--gpu-memory-utilization", "0.2", "--enforce-eager", "--max-num-seqs", "64")


def test_weights_go_from_gpu_to_gpu(served_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice through one group, and once through a new one, as when the server was started again."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, one of them for the server, found {torch.cuda.device_count()}")
    policy = policy_of(served_folder).to("cuda:0")
    server = ServerProcess(served_folder, tmp_path / "server.log", OPTIONS, transfer="nccl")
    engine = VLLMServerEngine([server.url], transfer="nccl")
    try:
        with monkeypatch.context() as here:
            here.setenv("CUDA_VISIBLE_DEVICES", "1")
            server.start()
        server.wait()
        engine.start(handle_of(policy))
        for version in range(3):
            if version == 2:
                server.post("/update_weight_version", {"new_version": "default"})
            engine.sync(version)
            for asked, reply in zip(MIXED, serve(engine, MIXED), strict=True):
                expected = trained_logps(policy.cpu(), asked, reply)
                assert reply.logps == pytest.approx(expected, abs=TF32)
            move(policy.to("cuda:0"), seed=version, share=0.1)
    finally:
        engine.stop()
        server.kill()
