"""Critic warm-up, and a run that continues where it stopped."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch

from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from tests.agents.harness import make_agent, make_data, make_trainer


class Watch(L.Callback):
    """Weights at the start and after each epoch, and the phase of each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.phases: list[str] = []
        self.actor_states: list[int] = []
        self.versions: list[int] = []

    def on_train_start(self, trainer, agent):
        self._keep(agent)

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.versions.append(max(turn.policy_version for turn in batch.rollout.turns))

    def on_train_epoch_end(self, trainer, agent):
        self._keep(agent)
        self.phases.append(agent.phase)
        state = trainer.optimizers[0].state
        self.actor_states.append(sum(p in state and bool(state[p]) for p in agent.actor.parameters()))

    def _keep(self, agent):
        self.weights.append({n: p.detach().clone() for n, p in agent.named_parameters()})


def same(a, b, prefix):
    return all(torch.equal(a[name], b[name]) for name in a if name.startswith(prefix))


@pytest.mark.parametrize("critic", [SharedCritic, SeparateCritic])
def test_the_actor_does_not_move_and_its_adam_state_stays_empty(tmp_path, tiny_folder, critic):
    watch, warmup = Watch(), CriticWarmup(rollouts=2, rounds=2, fraction=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(tmp_path, 3, [watch, warmup]).fit(make_agent(tiny_folder, critic()), make_data())
    assert watch.phases == ["critic_warmup", "critic_warmup", "train"]
    assert same(watch.weights[0], watch.weights[2], "actor")
    assert watch.actor_states[:2] == [0, 0]
    assert not same(watch.weights[0], watch.weights[1], "critic")
    assert not same(watch.weights[1], watch.weights[2], "critic")
    assert not same(watch.weights[2], watch.weights[3], "actor")
    assert watch.actor_states[2] > 0
    assert watch.versions == [0, 0, 0, 0, 4, 4]  # the buffer is of the first policy, then a fresh rollout


def test_each_round_trains_on_a_sample_without_replacement_of_all_data(tmp_path, tiny_folder):
    seen: list[list[tuple[int, int, int]]] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, agent, batch, batch_idx):
            seen.append([(t.env, t.episode, t.index) for t in batch.rollout.turns])

    callbacks = [Keep(), CriticWarmup(rollouts=4, rounds=2, fraction=0.5)]
    make_trainer(tmp_path, 4, callbacks).fit(make_agent(tiny_folder), make_data())
    rounds = [[turn for batch in seen[k : k + 4] for turn in batch] for k in (0, 4)]
    for turns in rounds:
        assert len(turns) == len(set(turns)) == 4 * 16 * 0.5
    assert set(rounds[0]) != set(rounds[1])


def test_it_says_when_the_critic_has_not_converged(tmp_path, tiny_folder):
    callbacks = [CriticWarmup(rollouts=1, rounds=1, fraction=1.0, min_explained_variance=0.99)]
    with pytest.warns(UserWarning, match="has not converged as the actor starts"):
        make_trainer(tmp_path, 2, callbacks).fit(make_agent(tiny_folder), make_data())


@pytest.mark.parametrize(("rollouts", "fraction"), [(40, 0.11), (0, 0.5), (3, 0.1), (4, 1.5)])
def test_a_sample_that_is_no_whole_number_of_iterations_is_refused(rollouts, fraction):
    with pytest.raises(ValueError, match="CriticWarmup"):
        CriticWarmup(rollouts=rollouts, rounds=1, fraction=fraction)


@pytest.mark.parametrize("stop_after", [1, 3, 4])  # inside a round of the warm-up, at its end, after it
def test_a_resumed_run_equals_one_run(tmp_path, tiny_folder, stop_after):
    def callbacks():
        return [CriticWarmup(rollouts=4, rounds=1, fraction=0.75)]

    def run(epochs, ckpt_path=None):
        agent = make_agent(tiny_folder, SeparateCritic())
        trainer = make_trainer(tmp_path, epochs, callbacks(), enable_checkpointing=False)
        trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
        return trainer, agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, whole = run(5)
        first, _ = run_and_save(tmp_path, tiny_folder, stop_after, callbacks())
        _, resumed = run(5, ckpt_path=str(first))
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def run_and_save(tmp_path, folder, epochs, callbacks):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    agent = make_agent(folder, SeparateCritic())
    trainer = make_trainer(tmp_path, epochs, [*callbacks, checkpoint], enable_checkpointing=True)
    trainer.fit(agent, make_data())
    return tmp_path / "stop.ckpt", agent


def test_the_reference_is_neither_saved_nor_optimised(tmp_path, tiny_folder):
    path, agent = run_and_save(tmp_path, tiny_folder, 1, [])
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in saved} == {"actor", "critic"}
    optimised = {id(p) for group in agent.trainer.optimizers[0].param_groups for p in group["params"]}
    assert not any(id(p) in optimised or p.requires_grad for p in agent._reference[0].parameters())
