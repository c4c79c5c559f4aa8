"""The quickstart trains on models with other chat templates than its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli import fit
from tests.published import TEMPLATES, published_folder
from tests.test_configs import FOLDER, made_small

BEGINS = {  # the first prompt, up to the rules of the environment
    "gemma2": "<bos><start_of_turn>user\n",
    "gemma3": "<bos><start_of_turn>user\n",
    "qwen2_5": "<|im_start|>system\n",
    "qwen3": "<|im_start|>system\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n",
    "mistral_v3": "<s>[INST] ",
    "phi3_5": "<|system|>\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ("gemma2", "llama3") else pytest.mark.long) for one in BEGINS]
)
def test_the_quickstart_trains_with_a_published_template(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Two iterations after its warm-up, on a tiny model of the template's family."""
    model = published_folder(tmp_path / name, name)
    config = made_small(yaml.safe_load((FOLDER / "quickstart.yaml").read_text()), model)
    fit(config, tmp_path, monkeypatch)
    assert "\n".join(log).count("has no system role") == TEMPLATES[name].folds
    run = tmp_path / "runs" / "quickstart"
    turns = [json.loads(line) for path in run.glob("**/turns/rank0-*.jsonl") for line in path.read_text().splitlines()]
    assert {turn["iteration"] for turn in turns} == {1, 2, 3}
    assert all(turn["prompt"].startswith(f"{BEGINS[name]}Walk to the object") for turn in turns)
    (events,) = run.rglob("events.out.tfevents.*")
    gaps = [point.value for point in EventAccumulator(str(events)).Reload().Scalars("mismatch/logp_gap_mean")]
    assert len(gaps) == 3
    assert all(math.isfinite(gap) and gap < 0.2 for gap in gaps)  # in bfloat16
