"""Keys of Lightning's Trainer that an agent cannot do anything with are refused by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)

from lightning_agentrl import Trainer
from lightning_agentrl.agents.checks import check_keys
from lightning_agentrl.callbacks import RunCheckpoints
from tests.agents.harness import make_agent, make_data, make_trainer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overfit_batches": 1}, "trainer.overfit_batches"),
    ({"overfit_batches": 0.5}, "trainer.overfit_batches"),
    ({"limit_train_batches": 1}, "trainer.limit_train_batches"),
    ({"limit_train_batches": 0.5}, "trainer.limit_train_batches"),
    ({"val_check_interval": 0.5}, "data.init_args.validation.every"),
    ({"val_check_interval": 1}, "trainer.val_check_interval"),
    ({"val_check_interval": "00:00:01:00"}, "trainer.val_check_interval"),
    ({"check_val_every_n_epoch": 0}, "data.init_args.validation.every"),
    ({"callbacks": [StochasticWeightAveraging(1e-3)]}, "model.init_args.optim.schedule"),
    ({"callbacks": [LearningRateFinder()]}, "model.init_args.optim.lr_actor"),
    ({"callbacks": [BatchSizeFinder()]}, "data.init_args.mini_batch_turns"),
    ({"callbacks": [BackboneFinetuning()]}, "BackboneFinetuning changes the optimizer"),
]


@pytest.mark.parametrize(("given", "part"), REFUSED, ids=lambda given: str(given)[:40])
def test_what_would_break_an_iteration_is_refused(given: dict[str, Any], part: str, tmp_path: Path) -> None:
    settings = {"limit_val_batches": None, **given}
    with pytest.raises(ValueError, match=re.escape(part)):
        check_keys(make_trainer(tmp_path, 1, **settings))


class OwnFinetuning(BaseFinetuning):
    """Wants to freeze a part that the agent does not have."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, *args: Any) -> None:
        """Change nothing."""


@pytest.mark.parametrize("make", [L.Trainer, Trainer])
@pytest.mark.parametrize(
    "callback", [BackboneFinetuning(), OwnFinetuning()], ids=lambda callback: type(callback).__name__
)
def test_a_callback_that_fails_in_its_own_setup_is_refused_from_python_too(
    callback: BaseFinetuning, make: type[L.Trainer], tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = make(max_epochs=1, callbacks=[callback], accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=rf"^{type(callback).__name__} changes the optimizer.*model\.init_args\.lora"):
        trainer.fit(make_agent(tiny_folder), make_data())


def test_validations_of_lightning_that_are_rare_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"save_on_train_epoch_end.*data\.init_args\.validation\.every"):
        check_keys(make_trainer(tmp_path, 9, check_val_every_n_epoch=3))


def test_what_changes_nothing_is_accepted(tmp_path: Path) -> None:
    plain = {"limit_val_batches": None, "min_epochs": 1, "num_sanity_val_steps": 2}
    callbacks = [LearningRateMonitor(), RunCheckpoints()]
    check_keys(make_trainer(tmp_path, 1, callbacks, enable_checkpointing=True, **plain))
    check_keys(make_trainer(tmp_path, 1, limit_val_batches=0))
    check_keys(make_trainer(tmp_path, 1, fast_dev_run=True))


def test_every_key_of_the_trainer_is_in_the_docs() -> None:
    """A key that a later Lightning adds is decided on here first."""
    page = Path(__file__).parents[2].joinpath("docs", "configuration.md").read_text()
    lacking = [key for key in inspect.signature(L.Trainer).parameters if f"`trainer.{key}`" not in page]
    assert not lacking


@pytest.mark.parametrize("data", [{}, {"train_dataloaders": [1, 2]}])
def test_an_agent_without_its_data_module_says_so(tiny_folder, tmp_path, data) -> None:
    with pytest.raises(ValueError, match=r"needs a RolloutDataModule.*trainer\.fit\(agent, data\)"):
        make_trainer(tmp_path, 1).fit(make_agent(tiny_folder), **data)


def test_an_agent_that_is_compiled_as_a_whole_says_what_to_do(tiny_folder: Path, tmp_path: Path) -> None:
    agent = torch.compile(make_agent(tiny_folder))
    with pytest.raises(ValueError, match=r"without torch\.compile.*model\.init_args\.compute\.kernels"):
        make_trainer(tmp_path, 1).fit(agent, make_data())
