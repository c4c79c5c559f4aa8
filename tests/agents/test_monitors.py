"""Metrics that have no value in an iteration are waited for; those that nobody logs are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

from lightning_agentrl.agents import agent as agent_module
from lightning_agentrl.agents.monitors import Monitors
from lightning_agentrl.callbacks import RunCheckpoints
from lightning_agentrl.rollout import EnvConfig
from tests.agents.harness import make_agent, make_data, make_trainer


def test_a_metric_is_waited_for_if_it_may_still_come() -> None:
    monitors, metrics = Monitors(), {}

    def log(**numbers: float) -> None:
        for name, number in numbers.items():
            metrics[name.replace("__", "/")] = torch.tensor(number)
            monitors.logged(name.replace("__", "/"))

    def value(name: str, phase: str = "train") -> torch.Tensor | None:
        return monitors.value(name, metrics, phase, "EarlyStopping")

    assert value("whatever/it is") is None  # nothing was done: the end of an iteration that a checkpoint was made in
    log(rollout__episodes=0.0)
    for name in (
        "rollout/success",
        "rollout/success_window",
        "rollout/source/a/b/return",
        "stop/env_done",
        "env/steps",
        "val/success",
    ):
        assert value(name) is None
    assert value("policy/entropy", "critic_warmup") is None
    for name in ("rollout/sucess", "policy/entropy", "valsuccess"):
        with pytest.raises(ValueError, match=f"monitor='{name}'.*'rollout/success'"):
            value(name)
    monitors.begin_iteration()
    log(rollout__success=0.5, val__success=0.25)
    assert value("rollout/success") == 0.5
    with pytest.raises(ValueError, match="val/sucess"):
        value("val/sucess")
    metrics["lr-AdamW/actor"] = torch.tensor(0.1)  # a callback sets it
    assert value("lr-AdamW/actor") == torch.tensor(0.1)
    monitors.begin_iteration()
    log(rollout__episodes=0.0)
    assert value("rollout/success") is None  # the value that is there is an old one
    assert value("val/success") is None


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, which is enough for Lightning's advice."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("filtered", [True, False])
def test_numbers_that_are_of_all_ranks_get_no_advice_to_average_them(
    filtered: bool, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the filter there is the advice, else this would say nothing."""
    warning_cache.clear()  # Lightning gives each advice once in a process
    if not filtered:
        monkeypatch.setattr(agent_module, "leave_out_hints", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, 1, limit_val_batches=1.0).fit(make_agent(tiny_folder), make_data())
    advice = [str(warning.message) for warning in caught if "sync_dist" in str(warning.message)]
    for name in ("policy/loss", "val/success", "time/update_seconds"):
        assert any(f"'{name}'" in text for text in advice) is not filtered
    assert not (filtered and advice)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_success_in_a_second_run_is_not_that_of_the_first(tmp_path: Path, exact_folder: Path) -> None:
    """As in a curriculum: all episodes of the first game succeed, none of the second one ends."""
    agent, windows = make_agent(exact_folder), []
    agent.recent_episodes.enough = 1
    for length in (2, 99):
        trainer = make_trainer(tmp_path, 1)
        trainer.fit(agent, make_data(env=EnvConfig("tests.episodes.small_envs:Walk-v0", {"length": length})))
        windows.append(trainer.callback_metrics.get("rollout/success_window"))
    assert windows == [1.0, None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_callbacks_wait_while_no_episode_ends(tmp_path: Path, exact_folder: Path) -> None:
    """Episodes of eight turns, four of them in an iteration."""
    stopping = EarlyStopping("rollout/success", mode="max", patience=2)
    saving = ModelCheckpoint(tmp_path / "a", "{epoch}", "rollout/success", mode="max", save_on_train_epoch_end=True)
    ours = RunCheckpoints(monitor="rollout/success", dirpath=str(tmp_path / "b"), keep=9)
    trainer = make_trainer(tmp_path, 5, [stopping, saving, ours], enable_checkpointing=True)
    long = EnvConfig("tests.episodes.small_envs:Walk-v0", {"length": 8})
    trainer.fit(make_agent(exact_folder), make_data(env=long))
    assert trainer.current_epoch == 5  # of five iterations, two tell anything
    assert stopping.wait_count == 1
    assert Path(saving.best_model_path).name == "epoch=1.ckpt"
    assert Path(ours.best_model_path).name == "iteration-00002.ckpt"
    again = EarlyStopping("rollout/success", mode="max", patience=2)
    trainer = make_trainer(tmp_path, 6, [again], check_val_every_n_epoch=1000)
    trainer.fit(make_agent(exact_folder), make_data(env=long), ckpt_path=str(tmp_path / "b" / "iteration-00005.ckpt"))
    assert again.wait_count == 2  # with the third value, of the sixth iteration
