"""After a fit that failed: its threads have ended with it, its episodes are kept, and the same objects fit again."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_agentrl.rollout import RolloutDataModule
from tests.agents.harness import make_agent, make_data, make_trainer

ENDED = ("rollout-loop", "transformers-engine", "env_")  # names of threads


class FailsIn(L.Callback):
    """Raises once, in the second iteration at the earliest, and keeps which turns were collected.

    Args:
        place: ``setup``, ``score``, ``update`` or ``validation``.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.turns: list[list[tuple[int, int, int]]] = []

    def fail(self, place: str) -> None:
        if self.place == place:
            self.place = ""
            raise ValueError(f"failed in {place}")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.fail("setup")

    def on_train_epoch_start(self, trainer: L.Trainer, agent: Any) -> None:
        score = type(agent).score

        def failing(rollout: Any) -> Any:
            self.fail("score")
            return score(agent, rollout)

        agent.score = failing if trainer.current_epoch else lambda rollout: score(agent, rollout)

    def on_train_batch_start(self, trainer: L.Trainer, agent: Any, batch: Any, batch_idx: int) -> None:
        self.turns += [[(turn.env, turn.episode, turn.index) for turn in batch.rollout.turns]]
        if trainer.current_epoch and batch_idx:
            self.fail("update")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.fail("validation")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(ENDED)}


def have_ended(others: set[threading.Thread]) -> bool:
    """Return whether soon no threads are left but those that were there before; an idle one takes a moment."""
    end = time.monotonic() + 10.0
    while left := threads() - others:
        if time.monotonic() > end:
            return False
        next(iter(left)).join(0.1)
    return True


def turns_taken(data: RolloutDataModule) -> dict[int, int]:
    """How many turns of each environment are behind the state that is kept."""
    return {env: state["turns_taken"] for env, state in data.state_dict()["sessions"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "staleness"),
    [
        ("update", 0),
        pytest.param("update", 1, marks=pytest.mark.slow),
        ("score", 1),
        pytest.param("score", 0, marks=pytest.mark.slow),
        pytest.param("validation", 0, marks=pytest.mark.slow),
        ("setup", 0),
    ],
)
def test_threads_end_with_a_fit_that_fails_and_the_next_goes_on(
    place: str, staleness: int, tiny_folder: Path, tmp_path: Path
) -> None:
    others, fails = threads(), FailsIn(place)
    agent, data = make_agent(tiny_folder), make_data(max_staleness=staleness)
    with pytest.raises(ValueError, match=f"failed in {place}"):
        make_trainer(tmp_path, 3, [fails], limit_val_batches=1.0).fit(agent, data)
    assert have_ended(others)
    if place != "setup":
        assert data.sessions
    kept = turns_taken(data)
    before = len(fails.turns)
    trainer = make_trainer(tmp_path, 2, [fails])
    trainer.fit(agent, data)
    assert trainer.global_step == 4
    assert have_ended(others)
    if place == "update" and not staleness:  # where nothing is collected beside it, what was collected is trained on
        taken = {env: sum(turn[0] == env for turns in fails.turns[:before] for turn in turns) for env in kept}
        assert taken == kept
        played = [turn for turns in fails.turns for turn in turns]
        assert len(played) == len(set(played))
        for env in kept:
            numbers = sorted((episode, index) for of, episode, index in played if of == env)
            assert all(b in ((a[0], a[1] + 1), (a[0] + 1, 0)) for a, b in pairwise(numbers))
