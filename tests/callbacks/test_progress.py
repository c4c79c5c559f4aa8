"""Progress: which stage, how far, what came of it; bars in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from lightning_agentrl.callbacks import CriticWarmup, StageProgress
from lightning_agentrl.callbacks import progress as progress_bars
from lightning_agentrl.rollout import ValidationConfig
from tests.agents.guards import SkipSome
from tests.agents.harness import make_agent, make_data, make_trainer


@pytest.fixture(autouse=True)
def no_lines_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show no line inside an iteration, however slow the machine is."""
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 1000.0)


@pytest.fixture
def all_lines(no_lines_between: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)


def progress(terminal: bool) -> tuple[StageProgress, io.StringIO]:
    shown = io.StringIO()
    bar = StageProgress()
    bar.console = Console(file=shown, force_terminal=terminal, width=200, soft_wrap=True, highlight=False)
    return bar, shown


def test_a_number_that_is_nearly_0_has_no_sign() -> None:
    trainer: Any = SimpleNamespace(callback_metrics={"kl/reference": -1e-5, "critic/explained_variance": -0.02})
    trainer.training = True
    assert StageProgress()._numbers(trainer) == "kl 0.000 explained -0.020"


@pytest.mark.slow
def test_one_line_for_each_iteration_where_there_is_no_terminal(tiny_folder: Path, tmp_path: Path) -> None:
    bar, shown = progress(terminal=False)
    callbacks = [CriticWarmup(rollouts=1, rounds=1, fraction=1.0), bar]
    trainer = make_trainer(tmp_path, 3, callbacks, enable_progress_bar=True, limit_val_batches=1)
    trainer.fit(make_agent(tiny_folder), make_data(validation=ValidationConfig(8, 4, every=3)))
    lines = shown.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "iteration 1/3 critic_warmup",
        "iteration 2/3 train",
        "iteration 3/3 train",
    ]
    for line in lines:
        assert re.search(r"success (-|\d\.\d{3}) reward/turn -?\d\.\d{3} valid \d\.\d{3} kl ", line)
    assert re.search(r"held-out success \d\.\d{3} \| took \d+:\d\d", lines[2])
    assert re.search(r"\| took \d+:\d\d$", lines[0])  # how long a warm-up takes says nothing of what is left
    assert re.search(r"\| took \d+:\d\d, \d+:\d\d left$", lines[1])
    assert lines[2].endswith(", 0:00 left")
    success = trainer.callback_metrics.get("rollout/success_window")
    assert f"success {'-' if success is None else format(float(success), '.3f')} " in lines[2]


@pytest.mark.slow
def test_steps_that_are_skipped_change_no_number_of_iterations(tiny_folder: Path, tmp_path: Path) -> None:
    bar, shown = progress(terminal=False)
    trainer = make_trainer(tmp_path, -1, [SkipSome([0]), bar], enable_progress_bar=True, max_steps=4)
    trainer.fit(make_agent(tiny_folder), make_data())
    lines = shown.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["iteration 1/2 train", "iteration 2/2 train"]
    assert lines[-1].endswith(", 0:00 left")


@pytest.mark.slow
def test_long_stages_say_how_far_they_are(all_lines: None, tiny_folder: Path, tmp_path: Path) -> None:
    bar, shown = progress(terminal=False)
    trainer = make_trainer(tmp_path, 1, [bar], enable_progress_bar=True)
    trainer.fit(make_agent(tiny_folder), make_data())
    lines = shown.getvalue().splitlines()
    assert lines[:3] == [f"iteration 1/1 train | collect {done}/16 turns" for done in range(3)]
    assert "iteration 1/1 train | collect 16/16 turns" in lines
    assert "iteration 1/1 train | update 16/16 rows" in lines
    assert any(re.fullmatch(r"iteration 1/1 train \| score \d+/\d+ rows", line) for line in lines)


def test_held_out_episodes_are_counted(all_lines: None, tiny_folder: Path, tmp_path: Path) -> None:
    bar, shown = progress(terminal=False)
    trainer = make_trainer(tmp_path, 1, [bar], enable_progress_bar=True, limit_val_batches=1)
    trainer.validate(make_agent(tiny_folder), make_data(), verbose=False)
    lines = shown.getvalue().splitlines()
    assert lines == [f"held-out episodes | validate {done}/8 episodes" for done in range(9)]


class DrawnAtOnce(Progress):
    """Draws its bars whenever they move, not four times a second, so that a fast machine shows them too."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.refresh()


@pytest.mark.slow
def test_a_terminal_shows_both_bars_and_keeps_a_line_of_each_iteration(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "Progress", DrawnAtOnce)
    bar, shown = progress(terminal=True)
    trainer = make_trainer(tmp_path, 2, [bar], enable_progress_bar=True)
    trainer.fit(make_agent(tiny_folder, max_tokens_per_micro_batch=100), make_data())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"iteration 1/2 train +[━╸╺ ]+0/2", text)
    assert re.search(r"(collect|score|update) +[━╸╺ ]+\d+/\d+ (turns|rows)", text)
    kept = [line for line in text.splitlines() if line.startswith("iteration") and "success" in line and " | " in line]
    assert len(kept) == 2
    assert bar._bars is None  # gone, so that the cursor is back


def test_the_bars_go_when_a_run_fails(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar, _ = progress(terminal=True)
    agent, data = make_agent(tiny_folder), make_data()

    def broken(rollout: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(agent, "score", broken)
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(tmp_path, 2, [bar], enable_progress_bar=True).fit(agent, data)
    data.teardown("fit")
    assert bar._bars is None


@pytest.mark.slow
def test_a_callback_leaves_the_agent_with_its_trainer(all_lines: None, tiny_folder: Path, tmp_path: Path) -> None:
    agent = make_agent(tiny_folder)
    (first, old), (second, _) = progress(terminal=False), progress(terminal=False)
    make_trainer(tmp_path, 1, [first], enable_progress_bar=True).fit(agent, make_data())
    printed = old.getvalue()
    make_trainer(tmp_path, 1, [second], enable_progress_bar=True).fit(agent, make_data())
    assert old.getvalue() == printed
    assert agent.clock.listeners == []


def test_the_time_left_counts_the_running_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four iterations of 100 s each: 30 s into the third, 170 s are left; as it ends, 100 s."""
    bar, _ = progress(terminal=False)
    trainer = make_trainer(tmp_path, 4, [bar], enable_progress_bar=True)
    bar._durations.extend([100.0, 100.0])
    trainer.fit_loop.epoch_progress.current.completed = trainer.fit_loop.epoch_progress.current.processed = 2
    now = time.monotonic()
    bar._iteration_started = now - 30
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert trainer.current_epoch == 2
    agent: Any = SimpleNamespace(datamodule=SimpleNamespace(planned_iterations=4))
    assert bar._time_left(trainer, agent, 2) == ", 2:50 left"
    assert bar._time_left(trainer, agent, 3) == ", 1:40 left"


@pytest.mark.slow
def test_a_run_that_steps_end_first_is_as_long_as_they_are(tiny_folder: Path, tmp_path: Path) -> None:
    """As where a config has its epochs, and the command line says to try a few steps."""
    bar, shown = progress(terminal=False)
    trainer = make_trainer(tmp_path, 40, [bar], enable_progress_bar=True, max_steps=4)
    trainer.fit(make_agent(tiny_folder), make_data())
    lines = shown.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["iteration 1/2 train", "iteration 2/2 train"]
    assert lines[-1].endswith(", 0:00 left")
