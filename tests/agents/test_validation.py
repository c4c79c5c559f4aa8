"""Validation: whole held-out episodes, alone and during a fit, also where an event loop already runs."""

from __future__ import annotations

import asyncio
import copy
import pickle

import lightning as L
import pytest
import torch

from lightning_agentrl.callbacks import EngineCheck, StageProgress
from lightning_agentrl.metrics.episodes import wilson_interval
from lightning_agentrl.rollout import ValidationConfig
from tests.agents.harness import make_agent, make_data, make_trainer


def validate(tmp_path, folder, **kwargs):
    data = make_data(validation=ValidationConfig(episodes=12, **kwargs))
    (numbers,) = make_trainer(tmp_path, 1, limit_val_batches=1.0).validate(make_agent(folder), data, verbose=False)
    return numbers


def test_validate_plays_every_held_out_seed_once(tmp_path, tiny_folder):
    numbers = validate(tmp_path, tiny_folder, num_envs=5)
    assert numbers["val/episodes"] == 12
    assert 1 <= numbers["val/mean_turns"] <= 3
    low, high = wilson_interval(numbers["val/success"] * 12, 12)
    assert (numbers["val/success_low"], numbers["val/success_high"]) == pytest.approx((low, high))
    assert low <= numbers["val/success"] <= high


@pytest.mark.slow
def test_validation_repeats_whatever_plays_beside_it(tmp_path, tiny_folder):
    assert validate(tmp_path, tiny_folder, num_envs=1) == pytest.approx(validate(tmp_path, tiny_folder, num_envs=12))


@pytest.mark.slow
def test_validation_does_not_disturb_training(tmp_path, tiny_folder):
    """Training environments and their random streams stay untouched: the same weights with and without."""

    def weights(**kwargs):
        agent = make_agent(tiny_folder)
        validation = ValidationConfig(episodes=8, num_envs=4, every=1)
        make_trainer(tmp_path, 2, **kwargs).fit(agent, make_data(validation=validation))
        return {name: p.detach() for name, p in agent.named_parameters()}

    without, with_validation = weights(), weights(limit_val_batches=1.0)
    assert all(without[name].equal(with_validation[name]) for name in without)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*was called before the ``update`` method")
def test_a_sanity_check_plays_nothing_and_does_not_warn(tmp_path, tiny_folder):
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 2}
    trainer = make_trainer(tmp_path, 1, **settings)
    trainer.fit(make_agent(tiny_folder), make_data(validation=ValidationConfig(every=0)))
    assert not any(name.startswith("val/") for name in trainer.callback_metrics)


class Copies(L.Callback):
    """Copies the agent inside a run."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.copies = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]


@pytest.mark.slow
def test_a_copy_of_an_agent_plays_by_itself(tmp_path, tiny_folder):
    agent, copies = make_agent(tiny_folder), Copies()
    trainer = make_trainer(tmp_path, 2, [copies, StageProgress(), EngineCheck()], enable_progress_bar=True)
    trainer.fit(agent, make_data())
    again = copy.deepcopy(agent)
    for other in (*copies.copies, again):
        assert other._trainer is None
        assert all(torch.equal(one, two) for one, two in zip(agent.parameters(), other.parameters(), strict=True))
        assert not {*map(id, agent.parameters())} & {*map(id, other.parameters())}
    scores = [
        make_trainer(tmp_path, 1, limit_val_batches=1.0).validate(one, make_data(), verbose=False)
        for one in (agent, *copies.copies, again)
    ]
    numbers = [{name: x for name, x in score[0].items() if not name.startswith("time/")} for score in scores]
    assert all(found == numbers[0] for found in numbers)
    make_trainer(tmp_path, 1).fit(again, make_data())
    assert any(not torch.equal(one, two) for one, two in zip(agent.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_fit_works_inside_a_running_event_loop(tmp_path, tiny_folder):
    async def notebook() -> int:
        trainer = make_trainer(tmp_path, 1)
        trainer.fit(make_agent(tiny_folder), make_data())
        return trainer.global_step

    assert asyncio.run(notebook()) == 2
