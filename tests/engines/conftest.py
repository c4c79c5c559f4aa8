"""For the tests of this folder that need vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Config, changed, fit, small_config, three_iterations
from tests.engines.servers import Pair


@pytest.fixture
def vllm_config(config: Config, served_folder: Path) -> Config:
    """A short run of a tiny model that samples with vLLM."""
    return sampled_with_vllm(changed(config, "model.init_args.model", str(served_folder)))


def sampled_with_vllm(config: Config) -> Config:
    engine = {"class_path": "VLLMEngine", "init_args": {"kv_cache_gb": 0.1}}
    return changed(config, "data.init_args.engine", engine)


@pytest.fixture(scope="session")
def vllm_played(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of `vllm_run` in one process, with its turns and metrics."""
    folder = tmp_path_factory.mktemp("played")
    config = three_iterations(sampled_with_vllm(small_config(served_folder)))
    config["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(folder)}
    config["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}}
    with pytest.MonkeyPatch.context() as patch:
        fit(config, folder, patch)
    return folder


@pytest.fixture
def vllm_run(vllm_config: Config) -> Config:
    """The same for three iterations."""
    return three_iterations(vllm_config)


@pytest.fixture
def server_config(config: Config, served_folder: Path, pair: Pair) -> Config:
    """A short run of a tiny model that samples with two servers."""
    engine = {"class_path": "VLLMServerEngine", "init_args": {"urls": [server.url for server in pair]}}
    return changed(changed(config, "model.init_args.model", str(served_folder)), "data.init_args.engine", engine)
