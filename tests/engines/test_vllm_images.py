"""vLLM reads images as the trainer does: the same ids, patches and positions, before and after updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_vision_folder

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = ROOT / "build" / "torchvision"  # made by `make test-vllm`


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_logps_of_replies_to_images_are_the_trainers(family, tmp_path):
    assert (TORCHVISION / "torchvision").is_dir(), "`make test-vllm` puts torchvision there"
    folder = tiny_vision_folder(tmp_path / family, family, hidden_size=128, head_dim=32)
    path = os.pathsep.join([str(TORCHVISION), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.images_in_vllm", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    versions = json.loads(ran.stdout.splitlines()[-1])
    assert len(versions) == 3
    for version, replies in enumerate(versions):
        for name, reply in replies.items():
            assert reply["gap"] < 2e-4, f"{name}, weights {version}"
    seen = [[reply["ids"] for reply in replies.values()] for replies in versions]
    assert seen[0] != seen[1] != seen[2]
    assert versions[0]["image"]["ids"] != versions[0]["equal ids, another image"]["ids"]
