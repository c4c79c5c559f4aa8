"""For the tests of this folder that need vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Config, changed, three_iterations
from tests.engines.servers import Pair


@pytest.fixture
def vllm_config(config: Config, served_folder: Path) -> Config:
    """A short run of a tiny model that samples with vLLM."""
    engine = {"class_path": "VLLMEngine", "init_args": {"kv_cache_gb": 0.1}}
    return changed(changed(config, "model.init_args.model", str(served_folder)), "data.init_args.engine", engine)


@pytest.fixture
def vllm_run(vllm_config: Config) -> Config:
    """The same for three iterations."""
    return three_iterations(vllm_config)


@pytest.fixture
def server_config(config: Config, served_folder: Path, pair: Pair) -> Config:
    """A short run of a tiny model that samples with two servers."""
    engine = {"class_path": "VLLMServerEngine", "init_args": {"urls": [server.url for server in pair]}}
    return changed(changed(config, "model.init_args.model", str(served_folder)), "data.init_args.engine", engine)
