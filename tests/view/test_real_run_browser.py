"""A short run of the quickstart with a tiny model, seen in a browser: the page of the run, and TensorBoard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser

from tests.pictures import chromium, picture_of_tensorboard, picture_of_view, tensorboard
from tests.test_configs import made_small

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Four iterations of eight turns, with pictures."""
    folder = tmp_path_factory.mktemp("real")
    config = made_small(yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()), tiny_folder)
    config["data"]["init_args"]["env"]["kwargs"] |= {"mission_in": "observation", "render_mode": "rgb_array"}
    config["trainer"] |= {"max_epochs": 4, "default_root_dir": str(folder), "enable_checkpointing": False}
    config["trainer"]["callbacks"] = [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    agentrl = str(Path(sys.executable).with_name("agentrl"))
    subprocess.run([agentrl, "fit", "--config", "small.yaml", "--quiet"], cwd=folder, check=True, timeout=500)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


def shows_something(path: Path) -> None:
    """Many colours, and not one of them nearly everywhere."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    assert len(colours) > 100
    assert counts.max() < 0.97 * len(pixels)


def test_the_page_of_the_run(run: Path, browser: Browser, tmp_path: Path) -> None:
    page = picture_of_view(browser, run, tmp_path / "view.png")
    shows_something(tmp_path / "view.png")
    (log,) = run.rglob("rank0-*.jsonl")
    turns = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(turns) == 4 * 8
    episodes = {(turn["env"], turn["episode"]) for turn in turns}
    assert page.locator(".row[data-id]").count() == min(len(episodes), 100)
    opened = page.locator("[data-turn]").first
    assert opened.locator("img").count() == 1  # what the environment drew
    shown = page.locator("[data-turn]").first.inner_text()
    assert any(line in shown for turn in turns for line in turn["observation"].splitlines())
    page.close()


def test_tensorboard_shows_episodes_as_text_and_as_pictures(run: Path, browser: Browser, tmp_path: Path) -> None:
    with tensorboard(run) as address:
        page = picture_of_tensorboard(browser, address, "text", "tf-text-loader", tmp_path / "text.png")
        page.get_by_text("environment").first.wait_for(timeout=60_000)
        assert page.get_by_text("reward:").count() > 0
        page.close()
        page = picture_of_tensorboard(browser, address, "timeseries", "card-view", tmp_path / "curves.png")
        assert page.get_by_text("rollout", exact=False).count() > 0
        page.close()
    shows_something(tmp_path / "text.png")
    shows_something(tmp_path / "curves.png")
