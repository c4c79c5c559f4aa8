"""Short runs of the quickstart with a tiny model, seen in a browser: their pages, and TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser

from benchmarks.vision.grid_world import warm_start
from tests.cli import fit
from tests.pictures import (
    chromium,
    picture_of_held_out,
    picture_of_tensorboard,
    picture_of_two,
    picture_of_view,
    tensorboard,
)
from tests.test_configs import made_small
from tests.tiny import tiny_vision_folder

ROOT = Path(__file__).parents[3]
PICTURES = os.environ.get("PICTURES")  # folder for those of the docs, which show runs of the demo model
pytestmark = [pytest.mark.browser, *([pytest.mark.timeout(3600)] if PICTURES else [])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Path]:
    """Four iterations with pictures, twice: the second run has another seed and a larger learning rate."""
    folder = tmp_path_factory.mktemp("real")
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    if PICTURES:
        config["data"]["init_args"] |= {"num_envs": 8, "mini_batch_turns": 32}
        config["data"]["init_args"]["validation"] |= {"episodes": 16, "num_envs": 16}
    else:
        config = made_small(config, tiny_folder)
    config["data"]["init_args"]["env"]["kwargs"] |= {"mission_in": "observation", "render_mode": "rgb_array"}
    config["trainer"] |= {"max_epochs": 8 if PICTURES else 4, "enable_checkpointing": False}
    config["data"]["init_args"]["validation"]["every"] = 4
    config["trainer"]["callbacks"] = [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]
    other = ("--seed_everything", "1", "--model.init_args.optim.lr_actor", "2e-5")
    with pytest.MonkeyPatch.context() as patch:
        fit(config, folder, patch, "--quiet", "--trainer.default_root_dir", "one")
        fit(config, folder, patch, "--quiet", "--trainer.default_root_dir", "other", *other)
    return folder / "one", folder / "other"


@pytest.fixture(scope="module")
def run(runs: tuple[Path, Path]) -> Path:
    return runs[0]


@pytest.fixture(scope="module")
def seen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that sees; for the docs one that was shown best moves for a minute."""
    folder = tmp_path_factory.mktemp("seen")
    if PICTURES:
        warm_start(folder / "model", seed=0)
    else:
        tiny_vision_folder(folder / "model", "qwen3_vl")
    config = made_small(yaml.safe_load((ROOT / "configs" / "grid_world_image.yaml").read_text()), folder / "model")
    config["data"]["init_args"].pop("engine")
    config["data"]["init_args"] |= {"num_envs": 8, "turns_per_env": 8, "mini_batch_turns": 32}
    config["data"]["init_args"]["env"]["kwargs"] = {"observation": "image", "cell_px": 16}
    config["data"]["init_args"]["prompt"] = {
        "think": False,
        "instruction": "",
        "examples": False,
        "system": "",
        "max_prompt_tokens": 96,
    }
    with pytest.MonkeyPatch.context() as patch:
        fit(config, folder, patch, "--quiet")
    return folder / config["trainer"]["default_root_dir"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where the pictures go that the docs show."""
    return Path(PICTURES or tmp_path)


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
    turns = [json.loads(line) for log in run.rglob("turns/rank0-*.jsonl") for line in log.read_text().splitlines()]
    played = [json.loads(line) for log in run.rglob("held_out/rank0-*.jsonl") for line in log.read_text().splitlines()]
    assert len(turns) % (4 * 8) == 0
    episodes = {(turn["env"], turn["episode"]) for turn in turns}
    held_out = {(turn["env"], turn["iteration"]) for turn in played}
    assert page.locator(".row[data-id]").count() == min(len(episodes) + len(held_out), 100)
    opened = page.locator("[data-turn]").first
    assert opened.locator("img").count() == 1  # what the environment drew
    shown = page.locator("[data-turn]").first.inner_text()
    assert any(line in shown for turn in [*turns, *played] for line in turn["observation"].splitlines())
    page.close()


def test_a_held_out_episode_with_pictures(run: Path, browser: Browser, pictures: Path) -> None:
    page = picture_of_held_out(browser, run, pictures / "view_held_out.png")
    shows_something(pictures / "view_held_out.png")
    assert page.locator("[data-turn]").count() == page.locator("[data-turn] img").count() > 1
    assert "held-out seed" in page.locator("#bar h3").inner_text()
    page.close()


def test_an_episode_that_was_seen(seen_run: Path, browser: Browser, pictures: Path) -> None:
    """Each turn has the picture that the policy saw."""
    page = picture_of_view(browser, seen_run, pictures / "view_images.png", show="solved" if PICTURES else "all")
    page.locator("#bench").scroll_into_view_if_needed()
    page.screenshot(path=str(pictures / "view_images.png"))
    shows_something(pictures / "view_images.png")
    turns = page.locator("[data-turn]").count()
    assert turns == page.locator("[data-turn] img").count() > 1
    assert page.locator("[data-turn] img").first.evaluate("image => image.naturalWidth") == 64
    page.close()


def test_two_runs_beside_each_other(runs: tuple[Path, Path], browser: Browser, pictures: Path) -> None:
    page = picture_of_two(browser, *runs, pictures / "view_compare.png")
    shows_something(pictures / "view_compare.png")
    assert page.locator(".pair img").count() > 1
    assert "lr_actor" in page.locator("#facts").inner_text()
    assert page.locator(".tile path[class=run1]").count() > 5
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
