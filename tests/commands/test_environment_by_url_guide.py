"""The environment behind a URL of docs/environments.md, as it stands but for the port, the model and the length."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.cli import changed, fit
from tests.commands.test_serve_env import Server
from tests.guides import DOCS, write_files

SMALL = {
    "data.init_args.num_envs": 2,
    "data.init_args.turns_per_env": 4,
    "data.init_args.mini_batch_turns": 4,
    "data.init_args.interaction.init_args.max_reply_tokens": 4,
    "data.init_args.validation.episodes": 1,
    "trainer.max_epochs": 1,
    "trainer.callbacks": [{"class_path": "TurnLog"}],
    "trainer.logger": False,
    "trainer.enable_progress_bar": False,
}


@pytest.mark.slow
def test_the_page_trains_on_its_server(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files("environments.md", tmp_path)
    page = (DOCS / "environments.md").read_text()
    (served,) = re.findall(r"^agentrl serve-env (.*) --port 8000$", page, re.M)
    config = yaml.safe_load((DOCS.parent / "configs" / "quickstart.yaml").read_text())
    config["data"]["init_args"] |= yaml.safe_load((tmp_path / "by_url.yaml").read_text())["data"]["init_args"]
    assert config["data"]["init_args"]["env"]["kwargs"]["url"].endswith(":8000")
    server = Server(*shlex.split(served))
    try:
        own = {"model.init_args.model": str(tiny_folder), "data.init_args.env.kwargs.url": server.url}
        for key, value in {**SMALL, **own}.items():
            config = changed(config, key, value)
        fit(config, tmp_path, monkeypatch)
    finally:
        server.kill()
    turns = [json.loads(line) for log in tmp_path.rglob("turns/*.jsonl") for line in log.open()]
    assert len(turns) >= 8
    assert all("Guess the number between 1 and 6" in turn["prompt"] for turn in turns if turn["turn"] == 0)
