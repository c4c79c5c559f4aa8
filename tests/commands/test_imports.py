"""What the command imports before it knows what it is asked for; seconds depend on the machine, modules do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

BESIDE_LIGHTNING = """
import sys, lightning
before = set(sys.modules)
import lightning_agentrl.cli
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
SLOW = {"peft", "aiohttp", "vllm", "tensorboard", "minigrid", "matplotlib", "playwright", "deepspeed", "agentrl_envs"}


@pytest.mark.slow
def test_packages_that_few_runs_need_are_not_imported_with_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE_LIGHTNING], capture_output=True, text=True, check=True)
    assert not SLOW & set(done.stdout.split())
    assert "lightning_agentrl" in done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("serve", {*SLOW, "lightning", "transformers"}),  # the process that vLLM then takes the place of
        ("serve_env", {*SLOW - {"aiohttp"}, "lightning", "transformers", "torch"}),
    ],
)
def test_a_server_begins_without_what_trains(command: str, unneeded: set[str]) -> None:
    program = f"import sys, lightning_agentrl.commands.{command}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not unneeded & set(done.stdout.split())
    assert f"lightning_agentrl.commands.{command}" in done.stdout.split()
