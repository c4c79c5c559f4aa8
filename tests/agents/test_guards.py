"""Between gradient and step a guard can skip: no weight moves on any rank, and the run counts on."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents import RolloutCallback
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from tests.agents import processes
from tests.agents.guards import SkipSome
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import assert_same, read
from tests.agents.test_fsdp2 import FSDP2


class Watch(RolloutCallback):
    """Weights before each attempt and the versions that sampled each rollout."""

    def __init__(self):
        self.weights, self.versions = [], []

    def on_rollout(self, trainer, agent, rollout):
        self.versions.append({turn.policy_version for turn in rollout.turns})

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.weights.append({name: p.detach().clone() for name, p in agent.named_parameters()})

    def on_train_end(self, trainer, agent):
        self.on_train_batch_start(trainer, agent, None, 0)


def fit(path, folder, guard, epochs=2, critic=None, ckpt_path=None, precision="64-true", **kwargs):
    watch = Watch()
    last = ModelCheckpoint(path, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = make_trainer(path, epochs, [watch, guard, last], precision=precision, enable_checkpointing=True, **kwargs)
    agent = make_agent(folder, critic or SharedCritic())
    trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
    return watch, agent, trainer


@pytest.mark.parametrize("precision", ["64-true", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_a_skipped_step_moves_nothing_and_is_counted(tmp_path, exact_folder, precision):
    guard = SkipSome([1])
    watch, agent, trainer = fit(tmp_path, exact_folder, guard, precision=precision)
    moved = [
        any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(watch.weights, watch.weights[1:], strict=False)
    ]
    assert moved == [True, False, True, True]
    assert (agent.policy_version, trainer.global_step) == (4, 3)
    assert watch.versions == [{0}, {2}]  # attempts, so that staleness and seeds do not depend on what was skipped
    (state,) = trainer.optimizers
    assert {int(of_weight["step"]) for of_weight in state.state.values()} == {3}
    assert [attempt.number for attempt in guard.seen] == [0, 1, 2, 3]
    assert all(attempt.norms.keys() == {"actor", "critic"} and attempt.norms["actor"] > 0 for attempt in guard.seen)
    assert all("policy/loss" in attempt.metrics for attempt in guard.seen)


@pytest.mark.slow
def test_attempts_are_in_the_checkpoint(tmp_path, exact_folder):
    """A run that skipped goes on with the weights of one that did not stop."""
    _, whole, _ = fit(tmp_path / "whole", exact_folder, SkipSome([0, 3]), epochs=3)
    fit(tmp_path / "part", exact_folder, SkipSome([0, 3]), epochs=1)
    resumed, agent, _ = fit(
        tmp_path / "part", exact_folder, SkipSome([0, 3]), -1, ckpt_path=tmp_path / "part" / "last.ckpt", max_steps=6
    )
    assert agent.policy_version == whole.policy_version == 6
    assert resumed.versions == [{2}, {4}]
    for (name, one), other in zip(whole.named_parameters(), agent.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_steps_of_an_earlier_run_of_the_agent_are_not_taken_for_skipped_ones(tmp_path, exact_folder):
    """They are attempts, and no steps of the run that is continued."""
    agent, data = make_agent(exact_folder), make_data()
    make_trainer(tmp_path, 1).fit(agent, data)
    trainer = make_trainer(tmp_path, 1, [SkipSome([3])])
    trainer.fit(agent, data)
    assert (agent.policy_version, trainer.global_step) == (4, 1)
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    _, resumed, trainer = fit(tmp_path, exact_folder, SkipSome([]), -1, ckpt_path=tmp_path / "second.ckpt", max_steps=6)
    assert (resumed.policy_version, trainer.global_step) == (8, 5)


@pytest.mark.slow
def test_a_guard_can_end_the_run(tmp_path, exact_folder):
    with pytest.raises(RuntimeError, match="step 3: attempt 2 is on the list"):
        fit(tmp_path, exact_folder, SkipSome([2], verdict="STOP"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(FSDP2, marks=pytest.mark.long, id="fsdp2")])
def test_one_rank_says_it_for_all(tmp_path, exact_folder, strategy):
    """Two processes, of which the second alone objects, take the steps of one process that objects."""
    guard = "{class_path: tests.agents.guards.SkipSome, init_args: {numbers: [5, 8], rank: %d}}"
    one, two = (
        processes.fit(
            tmp_path / str(count),
            exact_folder,
            SeparateCritic.__name__,
            count,
            f"--trainer.callbacks+={guard % (count - 1)}",
            strategy=strategy if count > 1 else None,
        )
        for count in (1, 2)
    )
    assert read(one)["attempts"] == read(two)["attempts"] == 10
    assert read(two)["global_step"] == 8
    assert_same(read(one), read(two))
