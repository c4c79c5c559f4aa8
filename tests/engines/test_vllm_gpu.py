"""vLLM on a GPU: it sleeps between collections, and samples from new weights when it is awake again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_agentrl.engines import VLLMEngine
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, serve, trained_logps
from tests.moving import move

TF32 = 2e-2  # so the attention of vLLM multiplies; an H200 was 0.005 off, weights of the version before are 0.8 off

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]


@pytest.mark.parametrize(("sleep", "graphs"), [(True, False), (True, True), (False, False), (False, True)])
def test_memory_is_given_back_while_it_sleeps(served_folder: Path, sleep: bool, graphs: bool) -> None:
    """And new weights are sampled from, with CUDA graphs recorded before they came, too."""
    policy = policy_of(served_folder).cuda()
    settings = {"sleep": sleep, "cuda_graphs": graphs}
    engine = VLLMEngine(dtype="float32", gpu_memory_utilization=0.2, **settings)
    engine.start(handle_of(policy))
    try:
        for version in range(2):
            engine.sync(version)
            awake, total = torch.cuda.mem_get_info()
            with engine.collecting():
                replies = serve(engine, MIXED)
            after, _ = torch.cuda.mem_get_info()
            assert (after - awake > 0.1 * total) is sleep
            for asked, reply in zip(MIXED, replies, strict=True):
                expected = trained_logps(policy.cpu(), asked, reply)
                assert reply.logps == pytest.approx(expected, abs=TF32)
            move(policy.cuda(), seed=version, share=0.1)
    finally:
        engine.stop()
