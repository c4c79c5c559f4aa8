"""A run that is told to end saves what it needs to go on as if nothing had happened."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_agentrl.advantages import GRPO, DualDiscountGAE
from lightning_agentrl.callbacks import CriticWarmup, StopOnSignals, TurnLog
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.prompts.memory import FullMemory
from lightning_agentrl.rollout import GroupRollout
from lightning_agentrl.rollout.stopping import Stopped
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import optimizer_states
from tests.callbacks.signalling import SignalAt

EPOCHS = 4
GROUPS = {
    "groups": GroupRollout(size=2, per_rollout=4, mini_batches=2, ahead=4, ahead_turns=1),
    "turns_per_env": 8,
    "mini_batch_turns": 128,
}
MODES: dict[str, dict[str, Any]] = {
    "windowed": {},
    "full": {"memory": FullMemory()},
    "groups": GROUPS,
    "ahead": {"max_staleness": 1},
    "groups ahead": {**GROUPS, "max_staleness": 2},
}


def run(path: Path, folder: Path, mode: str, *callbacks: L.Callback, start: str | None = None) -> dict[str, Any]:
    """Fit, the first two iterations being warm-up; the last checkpoint."""
    grouped = "groups" in mode
    agent = make_agent(
        folder, SeparateCritic() if grouped else SharedCritic(), advantage=GRPO() if grouped else DualDiscountGAE()
    )
    saving = L.pytorch.callbacks.ModelCheckpoint(path, filename="last", save_on_train_epoch_end=True)
    every = [*callbacks, CriticWarmup(rollouts=2, rounds=1, fraction=1.0), TurnLog(str(path / "turns")), saving]
    trainer = make_trainer(path, EPOCHS, every, enable_checkpointing=True, limit_val_batches=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(agent, make_data(engine=TransformersEngine(max_batch=1), **MODES[mode]), ckpt_path=start)
    return torch.load(saving.best_model_path, weights_only=True)


def stopped(path: Path, folder: Path, mode: str, stage: str, iteration: int, done: int = 1) -> Path:
    """The checkpoint of a run that got a signal."""
    with pytest.raises(Stopped) as error:
        run(path, folder, mode, StopOnSignals(), SignalAt(stage, iteration, done))
    assert error.value.code == 128 + signal.SIGTERM
    (saved,) = path.glob("stopped-*.ckpt")
    return saved


def turns(path: Path) -> list[dict[str, Any]]:
    """What was logged, but for times."""
    lines = [line for file in sorted((path / "turns").glob("*.jsonl")) for line in file.read_text().splitlines()]
    records = [{k: v for k, v in json.loads(line).items() if not k.endswith("_seconds")} for line in lines]
    return sorted(records, key=lambda record: (record["iteration"], record["env"], record["episode"], record["turn"]))


def assert_equal(a: Any, b: Any) -> None:
    """Plain types and tensors, to the bit; how long things took does not count."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"env_seconds", "engine_seconds"}:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            assert_equal(one, two)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_same_end(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert_equal(whole["state_dict"], resumed["state_dict"])
    assert_equal(optimizer_states(whole), optimizer_states(resumed))
    for part in ("RolloutDataModule", "recent_episodes", "attempts", "loops", "global_step"):
        assert_equal(whole[part], resumed[part])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, exact_folder):
    """Runs without a signal, by mode."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(mode: str) -> tuple[Path, dict[str, Any]]:
        if mode not in made:
            path = tmp_path_factory.mktemp("whole")
            made[mode] = path, run(path, exact_folder, mode)
        return made[mode]

    return of


QUICK = [("windowed", "collect", 2), ("ahead", "score", 3), ("windowed", "validate", 2)]
STAGES = [
    *(("collect", 0), ("score", 0), ("update", 0), ("update", 1), ("collect", 2), ("validate", 2)),
    *(("score", 3), ("update", 3), ("validate", 3)),
]
CASES = [(mode, *place) for mode in MODES for place in STAGES]


@pytest.mark.parametrize(
    ("mode", "stage", "iteration"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_run_that_was_told_to_end_goes_on_as_if_nothing_had_happened(
    tmp_path, exact_folder, whole, mode, stage, iteration
):
    path, uninterrupted = whole(mode)
    saved = stopped(tmp_path, exact_folder, mode, stage, iteration, done=5 if stage == "collect" else 1)
    resumed = run(tmp_path, exact_folder, mode, start=str(saved))
    assert_same_end(uninterrupted, resumed)
    assert turns(path) == turns(tmp_path)
