"""What Lightning's users expect works the ordinary way, with Lightning's own Trainer and with ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from torch import Tensor

from lightning_agentrl import Trainer
from lightning_agentrl.agents import CurrentScores, PPOAgent
from lightning_agentrl.callbacks import RunCheckpoints, RunSummary
from lightning_agentrl.rollout import EnvConfig, MiniBatch, Prepared, ValidationConfig
from lightning_agentrl.rollout.validation import EpisodeSeeds
from lightning_agentrl.types import Rollout
from tests.agents.harness import make_agent, make_data
from tests.agents.processes import assert_same, read

pytestmark = pytest.mark.filterwarnings("ignore")
both = pytest.mark.parametrize("make", [L.Trainer, Trainer])
RARE = ValidationConfig(episodes=4, num_envs=4, every=2)


def trainer_of(make: type[L.Trainer], path: Path, epochs: int, callbacks: list[L.Callback], **kwargs: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    where = {"accelerator": "cpu", "devices": 1, "precision": "64-true", "default_root_dir": path}
    return make(max_epochs=epochs, callbacks=callbacks, **{**where, **quiet, **kwargs})


class StopsIn(L.Callback):
    """Requests a stop in the first batch of an iteration, from a hook."""

    def __init__(self, hook: str, iteration: int) -> None:
        self.iteration = iteration
        setattr(self, hook, self.stop)

    def stop(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch + 1 == self.iteration:
            trainer.should_stop = True


@both
@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_a_stop_in_a_batch_ends_the_run_with_a_checkpoint(
    hook: str, make: type[L.Trainer], tmp_path: Path, exact_folder: Path
) -> None:
    """After the iteration, and a run that is resumed from it trains as one that was not stopped."""

    def run(name: str, *callbacks: L.Callback, **kwargs: Any) -> Path:
        saving = RunCheckpoints(every_n_epochs=3, dirpath=str(tmp_path / name))
        trainer = trainer_of(make, tmp_path, 3, [*callbacks, saving])
        trainer.fit(make_agent(exact_folder), make_data(validation=ValidationConfig(every=0)), **kwargs)
        return Path(saving.last_model_path)

    stopped = run("stopped", StopsIn(hook, 2))
    assert stopped.name == "iteration-00002.ckpt"
    resumed, whole = run("resumed", ckpt_path=stopped), run("whole")
    assert_same(read(resumed), read(whole))


@both
@pytest.mark.slow
def test_a_timer_ends_the_run_between_iterations(make: type[L.Trainer], tmp_path: Path, tiny_folder: Path) -> None:
    trainer = trainer_of(make, tmp_path, 9, [], max_time=timedelta(milliseconds=1))
    trainer.fit(make_agent(tiny_folder), make_data())
    assert (trainer.current_epoch, trainer.global_step) == (1, 2)


@both
@pytest.mark.slow
def test_model_checkpoint_saves_every_iteration_and_last_finds_it(
    make: type[L.Trainer], tmp_path: Path, tiny_folder: Path
) -> None:
    """With validations after every second iteration only."""

    def fit(epochs: int, **kwargs: Any) -> L.Trainer:
        saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, save_last=True, enable_version_counter=False)
        trainer = trainer_of(make, tmp_path, epochs, [saving])
        trainer.fit(make_agent(tiny_folder), make_data(validation=RARE), **kwargs)
        return trainer

    fit(3)
    names = ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt", "last.ckpt"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    again = fit(4, ckpt_path="last")
    assert Path(str(again.ckpt_path)).name == "last.ckpt"
    assert (again.current_epoch, again.global_step) == (4, 8)


@pytest.mark.slow
def test_last_finds_the_checkpoint_of_run_checkpoints(tmp_path: Path, tiny_folder: Path) -> None:
    ids = []
    for epochs in (1, 2):
        agent = make_agent(tiny_folder)
        trainer_of(Trainer, tmp_path, epochs, []).fit(agent, make_data(), ckpt_path="last")
        ids.append(agent.run_id)
    assert ids[0] == ids[1]


class Losses(L.Callback):
    """What hooks are given as outputs."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(float(outputs["loss"]))


@both
@pytest.mark.slow
def test_outputs_of_a_batch_hold_the_loss(make: type[L.Trainer], tmp_path: Path, tiny_folder: Path) -> None:
    losses = Losses()
    trainer = trainer_of(make, tmp_path, 1, [losses])
    trainer.fit(make_agent(tiny_folder), make_data())
    means = [trainer.callback_metrics[name] for name in ("policy/loss", "critic/loss")]
    assert sum(losses.seen) / 2 == pytest.approx(float(sum(means)))


@both
@pytest.mark.slow
def test_early_stopping_watches_any_logged_metric(make: type[L.Trainer], tmp_path: Path, exact_folder: Path) -> None:
    """Episodes of eight turns, four of them in an iteration, so every second has a value; the last one is kept."""
    stopping = EarlyStopping("rollout/success", mode="max", patience=2, strict=False)
    held_out = EarlyStopping("val/success", mode="max", patience=9, strict=False)
    ours = RunCheckpoints(monitor="rollout/success", dirpath=str(tmp_path), keep=9)
    trainer = trainer_of(make, tmp_path, 9, [stopping, held_out, ours])
    long = EnvConfig("tests.episodes.small_envs:Walk-v0", {"length": 8})
    trainer.fit(make_agent(exact_folder), make_data(env=long, validation=RARE))
    assert trainer.current_epoch == 4  # the first value is that of the second iteration
    assert held_out.wait_count == 2
    assert Path(ours.best_model_path).name == "iteration-00002.ckpt"
    with pytest.raises(RuntimeError, match="rollout/sucess"):
        trainer_of(make, tmp_path, 2, [EarlyStopping("rollout/sucess")]).fit(make_agent(exact_folder), make_data())


@both
@pytest.mark.slow
def test_fast_dev_run_is_one_iteration_and_one_held_out_episode(
    make: type[L.Trainer], tmp_path: Path, tiny_folder: Path
) -> None:
    trainer = trainer_of(make, tmp_path, 9, [RunSummary(), RunCheckpoints()], fast_dev_run=True)
    trainer.fit(make_agent(tiny_folder), make_data())
    assert (trainer.current_epoch, trainer.global_step) == (1, 1)
    assert trainer.callback_metrics["val/episodes"] == 1
    assert not [*tmp_path.rglob("*.ckpt")]


class Logs(PPOAgent):
    """Logs in the methods that users override."""

    def prepare(self, rollout: Rollout) -> Prepared:
        self.log("mine/prepare", float(len(rollout)))
        return super().prepare(rollout)

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        self.log("mine/shape_rewards", rollout.rewards.sum())
        return super().shape_rewards(rollout)

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        self.log("mine/policy_loss", 1.0, on_step=False, on_epoch=True)
        return super().policy_loss(batch, scores)

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        self.log("mine/value_loss", values.mean())
        return super().value_loss(batch, values)

    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        self.log("mine/update_metrics", 3.0, on_epoch=True)
        return super().update_metrics(batch, scores)

    def training_step(self, batch: MiniBatch, batch_idx: int) -> dict[str, Tensor]:
        self.log("mine/training_step", 4.0, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: EpisodeSeeds, batch_idx: int) -> None:
        self.log("mine/validation_step", float(len(batch.seeds)))
        super().validation_step(batch, batch_idx)


@both
@pytest.mark.slow
def test_log_works_in_the_methods_that_users_override(make: type[L.Trainer], tmp_path: Path, tiny_folder: Path) -> None:
    trainer = trainer_of(make, tmp_path, 1, [])
    trainer.fit(Logs(str(tiny_folder)), make_data())
    found = {name.removeprefix("mine/") for name in trainer.callback_metrics if name.startswith("mine/")}
    update = {"policy_loss", "value_loss", "update_metrics", "training_step"}
    assert found >= {"prepare", "shape_rewards", "validation_step", *update}
    assert trainer.callback_metrics["mine/prepare"] == 16
    assert trainer.callback_metrics["mine/validation_step"] == 8


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, which is enough for Lightning's advice."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_numbers_of_all_ranks_get_no_advice_to_average_them(tmp_path: Path, tiny_folder: Path) -> None:
    warning_cache.clear()  # Lightning gives each advice once in a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(L.Trainer, tmp_path, 1, []).fit(make_agent(tiny_folder), make_data())
    assert not [warning for warning in caught if "sync_dist" in str(warning.message)]


@pytest.mark.slow
def test_success_in_a_second_run_is_not_that_of_the_first(tmp_path: Path, exact_folder: Path) -> None:
    """As in a curriculum: all episodes of the first game succeed, none of the second one ends."""
    agent, windows = make_agent(exact_folder), []
    agent.recent_episodes.enough = 1
    for length in (2, 99):
        trainer = trainer_of(L.Trainer, tmp_path, 1, [], limit_val_batches=0)
        trainer.fit(agent, make_data(env=EnvConfig("tests.episodes.small_envs:Walk-v0", {"length": length})))
        windows.append(trainer.callback_metrics.get("rollout/success_window"))
    assert windows == [1.0, None]
