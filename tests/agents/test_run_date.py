"""Chat templates that write the date: one date for a run, its checkpoints and whatever is loaded from them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import lightning as L
import pytest

from lightning_agentrl.commands.plan import first_session
from lightning_agentrl.rollout import FullMemory, RolloutDataModule, data_module
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer
from tests.tiny import CHATML, tiny_model_folder, tiny_tokenizer

LAST_MINUTE = datetime(2024, 12, 31, 23, 59)
NEXT_DAY = datetime(2025, 1, 1, 0, 1)


@pytest.fixture(scope="module")
def dated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
    return tiny_model_folder(tmp_path_factory.mktemp("dated"), tokenizer=tokenizer)


def data_of(now: datetime) -> RolloutDataModule:
    data = make_data(memory=FullMemory(), turns_per_env=2, mini_batch_turns=4)
    data.date.now = now
    return data


def played(folder: Path, path: Path, now: datetime, epochs: int, ckpt_path: Path | None = None) -> list[list[int]]:
    """Return the ids of the last rollout of a run that begins at this time, and save the run."""
    kept, agent = KeepRollouts(), make_agent(folder)
    trainer = make_trainer(path, epochs, [kept])
    trainer.fit(agent, data_of(now), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path / f"{epochs}.ckpt")
    return [list(sample.ids) for sample in kept.rollouts[-1].samples]


@pytest.mark.slow
def test_a_run_resumed_after_midnight_has_the_prompts_of_the_day_before(
    dated_folder: Path, tmp_path: Path, log: list[str]
) -> None:
    whole = played(dated_folder, tmp_path / "whole", LAST_MINUTE, 2)
    assert len([line for line in log if "2024-12-31" in line]) == 1
    played(dated_folder, tmp_path / "parts", LAST_MINUTE, 1)
    resumed = played(dated_folder, tmp_path / "parts", NEXT_DAY, 2, tmp_path / "parts" / "1.ckpt")
    assert resumed == whole
    assert not [line for line in log if "2025-01-01" in line]
    texts = [tiny_tokenizer().decode(ids) for ids in resumed]
    assert all("31 Dec 2024" in text for text in texts)


def test_validation_has_the_date_of_its_checkpoint(dated_folder: Path, tmp_path: Path) -> None:
    played(dated_folder, tmp_path, LAST_MINUTE, 1)
    watched: list[str] = []

    class Watch(L.Callback):
        def on_validation_epoch_end(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
            with first_session(agent.datamodule) as session:
                watched.append(tiny_tokenizer().decode(session.prompt().input.ids))

    trainer = make_trainer(tmp_path, 1, [Watch()], limit_val_batches=None)
    trainer.validate(make_agent(dated_folder), data_of(NEXT_DAY), ckpt_path=tmp_path / "1.ckpt", verbose=False)
    assert "31 Dec 2024" in watched[0]


def test_all_ranks_have_the_date_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "all_gather", lambda own: [LAST_MINUTE, own])
    data = data_of(NEXT_DAY)
    data.setup("fit")
    data.teardown("fit")
    assert data.date.now == LAST_MINUTE


def test_a_template_without_a_date_logs_none(tiny_folder: Path, tmp_path: Path, log: list[str]) -> None:
    played(tiny_folder, tmp_path, LAST_MINUTE, 1)
    assert not [line for line in log if "2024-12-31" in line]
