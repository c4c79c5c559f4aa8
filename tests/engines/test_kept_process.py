"""What vLLM changes in a process is put back; with vLLM itself: ``test_vllm_start.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_agentrl.engines.vllm.start import QUIET, kept_process

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def test_the_precision_of_products_stays_the_trainers() -> None:
    torch.set_float32_matmul_precision("high")
    with kept_process(CPU):
        torch.set_float32_matmul_precision("highest")
    assert torch.get_float32_matmul_precision() == "high"


def test_vllm_leaves_logging_alone_unless_the_user_has_told_it_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_process(CPU):
        assert {name: os.environ[name] for name in QUIET} == QUIET
        os.environ["VLLM_OF_ITS_OWN"] = "1"
    assert not set(QUIET) & set(os.environ)
    assert os.environ.pop("VLLM_OF_ITS_OWN") == "1"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with kept_process(CPU):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert "VLLM_CONFIGURE_LOGGING" not in os.environ
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
