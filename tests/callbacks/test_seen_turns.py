"""What an agent saw is in the turn log and on the page of its run."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from lightning_agentrl.callbacks import TurnLog
from lightning_agentrl.rollout import EnvConfig, PromptFormat, WindowMemory
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.tiny import tiny_vision_folder


@pytest.mark.slow
def test_the_log_holds_what_was_seen_and_what_was_read(tmp_path: Path) -> None:
    model = tiny_vision_folder(tmp_path / "model", "qwen3_vl")
    data = make_data(
        env=EnvConfig("tests.seen_game:Corner-v0", {"side": 480, "images": 2}),
        prompt=PromptFormat(think=False, max_prompt_tokens=1200),
        memory=WindowMemory(0),
        turns_per_env=2,
        mini_batch_turns=8,
    )
    make_trainer(tmp_path, 1, [TurnLog(str(tmp_path / "turns"))]).fit(make_agent(model), data)
    (log,) = (tmp_path / "turns").glob("*.jsonl")
    turns = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(turns) == 8
    for turn in turns:
        picture = Image.open(io.BytesIO(base64.b64decode(turn["image"])))
        assert picture.size == (384, 192)  # two of 256 pixels, side by side
        assert turn["prompt"].count("[image of 256 tokens]") == 2
        assert len(turn["prompt_ids"]) > 512
