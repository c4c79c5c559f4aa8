"""Models of different families in vLLM, with the code that writes the families in docs/results/vllm.md."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.engines.families import BOUND, IN_CI, gaps, measure, verdict, write
from lightning_agentrl.engines import PolicyHandle, VLLMEngine, VLLMServerEngine
from lightning_agentrl.engines.vllm import start
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from tests.engines.servers import ServerProcess
from tests.engines.test_vllm_engine import CLOSE

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("case", [*IN_CI, "lfm2", "deepseek_v3"])
def test_log_probs_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    measured = measure(case, tmp_path)
    assert set(measured) == {"own", "sent", "folder"}
    assert not verdict(case, measured), measured


@pytest.mark.long
@pytest.mark.parametrize("case", IN_CI)
def test_those_of_a_server_are_too(case: str, tmp_path: Path) -> None:
    write(case, tmp_path / "model")
    server = ServerProcess(tmp_path / "model", tmp_path / "log")
    engine = VLLMServerEngine([server.url])
    try:
        server.start()
        server.wait(540)
        policy = LanguageModel(load_causal_lm(str(tmp_path / "model"))).eval()
        engine.start(PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=120))
        assert max(gaps(engine, policy)) <= BOUND
    finally:
        engine.stop()
        server.kill()


def test_a_family_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    write("apertus", tmp_path)
    policy = LanguageModel(load_causal_lm(str(tmp_path)))
    with mock.patch.object(start, "UNFIT", frozenset({"apertus"})), pytest.raises(ValueError, match="family apertus"):
        VLLMEngine().start(PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=120))


def test_a_family_of_which_vllm_has_no_model_is_refused_by_name(tmp_path: Path) -> None:
    write("arcee", tmp_path)
    policy = LanguageModel(load_causal_lm(str(tmp_path)))
    with pytest.raises(ValueError, match="family arcee"):
        VLLMEngine(kv_cache_gb=0.05).start(PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=120))
