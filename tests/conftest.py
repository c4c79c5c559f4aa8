"""What all tests share: one quiet, repeatable torch, no model hub, and a tiny model made once."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the hub is a mistake
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

from tests.tiny import tiny_model_folder


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny models; more threads only wait for each other
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with its tokenizer. Do not write to it."""
    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def exact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model that is exact in float64 (the norms of the others compute in float32). Do not write."""
    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "gpt_neox", family="gpt_neox")


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama that vLLM can run. Do not write to it."""
    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "served", head_dim=32)
