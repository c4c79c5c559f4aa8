"""Critic warm-up, and a run that continues where it stopped."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_agentrl.agents.checks import check_trainer
from lightning_agentrl.callbacks import CriticWarmup, RunCheckpoints, RunSummary, TurnLog
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses import AdaptiveKL
from lightning_agentrl.models.critic import LeastSquaresCritic, SeparateCritic, SharedCritic
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.rollout import EnvConfig
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.run_files import find_run
from tests.agents.harness import make_agent, make_data, make_trainer


class Watch(L.Callback):
    """Weights at the start and after each epoch, and the phase of each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.phases: list[str] = []
        self.actor_states: list[int] = []
        self.versions: list[int] = []
        self.actor_losses: list[bool] = []  # whether the actor's loss was computed

    def on_train_start(self, trainer, agent):
        self._keep(agent)

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.versions.append(max(turn.policy_version for turn in batch.rollout.turns))

    def on_train_epoch_end(self, trainer, agent):
        self._keep(agent)
        self.phases.append(agent.phase)
        self.actor_losses.append("policy/loss" in trainer.callback_metrics)
        state = trainer.optimizers[0].state
        self.actor_states.append(sum(p in state and bool(state[p]) for p in agent.actor.parameters()))

    def _keep(self, agent):
        self.weights.append({n: p.detach().clone() for n, p in agent.named_parameters()})


def same(a, b, prefix):
    return all(torch.equal(a[name], b[name]) for name in a if name.startswith(prefix))


@pytest.mark.parametrize("critic", [SharedCritic, pytest.param(SeparateCritic, marks=pytest.mark.slow)])
def test_the_actor_does_not_move_and_its_adam_state_stays_empty(tmp_path, tiny_folder, critic):
    watch, warmup = Watch(), CriticWarmup(rollouts=2, rounds=2, fraction=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(tmp_path, 3, [watch, warmup]).fit(make_agent(tiny_folder, critic()), make_data())
    assert watch.phases == ["critic_warmup", "critic_warmup", "train"]
    assert same(watch.weights[0], watch.weights[2], "actor")
    assert watch.actor_states[:2] == [0, 0]
    assert watch.actor_losses == [False, False, True]  # no graph of the actor is built
    assert not same(watch.weights[0], watch.weights[1], "critic")
    assert not same(watch.weights[1], watch.weights[2], "critic")
    assert not same(watch.weights[2], watch.weights[3], "actor")
    assert watch.actor_states[2] > 0
    assert watch.versions == [0, 0, 0, 0, 4, 4]  # the buffer is of the first policy, then a fresh rollout


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("least", "warnings_of_it"), [(0.99, 1), (None, 0)])
def test_it_says_when_the_critic_has_not_converged_unless_told_not_to(tmp_path, tiny_folder, least, warnings_of_it):
    callbacks = [CriticWarmup(rollouts=1, rounds=1, fraction=1.0, min_explained_variance=least)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, 2, callbacks).fit(make_agent(tiny_folder), make_data())
    assert sum("has not converged when the actor starts" in str(one.message) for one in caught) == warnings_of_it


@pytest.mark.parametrize(("critic", "advice"), [(LeastSquaresCritic, "rollouts, so"), (SharedCritic, "lr_critic")])
def test_advice_for_a_critic_that_explains_little_fits_the_critic(tmp_path, tiny_folder, critic, advice):
    callbacks = [CriticWarmup(rollouts=1, rounds=1, fraction=1.0, min_explained_variance=0.99)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, 2, callbacks).fit(make_agent(tiny_folder, critic=critic()), make_data())
    (said,) = [str(one.message) for one in caught if "has not converged" in str(one.message)]
    assert advice in said
    assert ("lr_critic" in said) is not critic.fitted


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({"max_steps": 4}, "trainer.max_steps is 4, so the actor is never trained"),
        pytest.param({"epochs": 9, "max_steps": 4}, "trainer.max_steps is 4", marks=pytest.mark.slow),
        pytest.param({"epochs": 2}, "trainer.max_epochs is 2, so the actor is never trained", marks=pytest.mark.slow),
        pytest.param({"max_steps": 6}, "", marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_that_takes_the_whole_run_is_told(tmp_path, tiny_folder, ends, message):
    """Two iterations of two steps."""
    trainer = make_trainer(tmp_path, **{"epochs": -1, **ends}, callbacks=[CriticWarmup(2, 2, 0.5)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_agent(tiny_folder), make_data())
    sentences = [str(one.message) for one in caught if "never trained" in str(one.message)]
    assert [message in sentence for sentence in sentences] == [True] * bool(message)


@pytest.mark.parametrize(("rollouts", "fraction"), [(40, 0.11), (0, 0.5), (3, 0.1), (4, 1.5)])
def test_a_sample_that_is_no_whole_number_of_iterations_is_refused(rollouts, fraction):
    with pytest.raises(ValueError, match="CriticWarmup"):
        CriticWarmup(rollouts=rollouts, rounds=1, fraction=fraction)


@pytest.mark.parametrize("stops", [(1,), pytest.param((3, 4), marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_run(tmp_path, tiny_folder, stops):
    """Stopped inside a round of the warm-up, at its end, and after it; told to end by iterations or by steps."""

    def callbacks():
        return [CriticWarmup(rollouts=4, rounds=1, fraction=0.75)]

    def run(epochs, ckpt_path=None, max_steps=-1):
        agent = make_agent(tiny_folder, SeparateCritic())
        trainer = make_trainer(tmp_path, epochs, callbacks(), enable_checkpointing=False, max_steps=max_steps)
        trainer.fit(agent, make_data(), ckpt_path=ckpt_path)
        return trainer, agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, whole = run(5)
        for stop_after in stops:
            folder = tmp_path / str(stop_after)
            first, _ = run_and_save(folder, tiny_folder, stop_after, callbacks())
            _, resumed = run(-1 if 4 in stops else 5, ckpt_path=str(first), max_steps=10 if 4 in stops else -1)
            for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
                assert torch.equal(a, b), (stop_after, name)


def run_and_save(tmp_path, folder, epochs, callbacks):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    agent = make_agent(folder, SeparateCritic())
    trainer = make_trainer(tmp_path, epochs, [*callbacks, checkpoint], enable_checkpointing=True)
    trainer.fit(agent, make_data())
    return tmp_path / "stop.ckpt", agent


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_folder):
    """Checkpoint and agent of one iteration. Do not change them."""
    return run_and_save(tmp_path_factory.mktemp("saved"), tiny_folder, 1, [])


def test_the_reference_is_neither_saved_nor_optimised(saved, tiny_folder):
    """Names of weights stay as they are, the actor's first: checkpoints have them, and the groups their order."""
    path, agent = saved
    state = torch.load(path, weights_only=True)["state_dict"]
    own = list(load_causal_lm(str(tiny_folder)).state_dict())
    head = ["critic.head.linear.weight", "critic.head.linear.bias"]
    assert list(state) == [*(f"actor.lm.{n}" for n in own), *(f"critic.backbone.{n}" for n in own), *head]
    optimised = {id(p) for group in agent.trainer.optimizers[0].param_groups for p in group["params"]}
    assert not any(id(p) in optimised or p.requires_grad for p in agent.models.reference.parameters())


@pytest.mark.slow
def test_a_resumed_run_takes_its_learning_rates_from_the_configuration(saved, tmp_path, tiny_folder):
    path, _ = saved
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(make_agent(tiny_folder, SeparateCritic(), lr_actor=1e-7), make_data(), ckpt_path=str(path))
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1e-7, 1e-2]


@pytest.mark.slow
def test_a_checkpoint_saved_after_the_fit_has_the_environments(tmp_path, tiny_folder):
    trainer, data = make_trainer(tmp_path, 2), make_data()
    trainer.fit(make_agent(tiny_folder), data)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    state = torch.load(tmp_path / "late.ckpt", weights_only=True)["RolloutDataModule"]
    assert sorted(state["sessions"]) == [0, 1, 2, 3]
    assert all(session["turns_taken"] == 8 for session in state["sessions"].values())
    assert state["iteration"] == 2


@pytest.mark.slow
def test_a_checkpoint_is_validated_on_any_environment_but_continued_on_its_own_only(saved, tmp_path, tiny_folder):
    path, _ = saved
    other = {"env": EnvConfig("agentrl_envs:Bandit-v0")}
    trainer = make_trainer(tmp_path, 2, limit_val_batches=1.0)
    agent = make_agent(tiny_folder, SeparateCritic())
    (numbers,) = trainer.validate(agent, make_data(**other), ckpt_path=str(path), verbose=False)
    assert numbers["val/mean_turns"] == 1
    for change in (other, {"seed": 4}):
        with pytest.raises(ValueError, match=r"GuessNumber.*3"):
            make_trainer(tmp_path, 2).fit(
                make_agent(tiny_folder, SeparateCritic()), make_data(**change), ckpt_path=str(path)
            )


@pytest.mark.slow
def test_an_adaptive_coefficient_is_continued(tmp_path, tiny_folder):
    def agent():
        return make_agent(tiny_folder, SeparateCritic(), kl_reward=AdaptiveKL(0.01, target=1e-9, horizon=100))

    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    first = agent()
    make_trainer(tmp_path, 3, [checkpoint], enable_checkpointing=True).fit(first, make_data())
    assert first.kl_coefficient.value != 0.01
    second = agent()
    make_trainer(tmp_path, 3).fit(second, make_data(), ckpt_path=str(tmp_path / "stop.ckpt"))
    assert second.kl_coefficient.value == first.kl_coefficient.value


def test_a_horizon_that_an_iteration_would_outrun_is_refused_before_weights_are_read(tmp_path, tiny_folder):
    agent, data = make_agent(tiny_folder, kl_reward=AdaptiveKL(horizon=3)), make_data()
    with pytest.raises(ConfigError, match=r"16 turns per update.*above 3\.2, got 3.*model\.init_args\.kl\.reward\."):
        make_trainer(tmp_path, 1).fit(agent, data)
    assert not hasattr(agent, "models")


@pytest.mark.slow
def test_an_agent_that_has_adapted_its_coefficient_goes_on_from_its_own_checkpoint(tmp_path, tiny_folder):
    """What the run was made of is the initial coefficient, also once another one holds."""
    given = AdaptiveKL(0.01, target=1e-9, horizon=100)
    agent = make_agent(tiny_folder, kl_reward=given)
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    make_trainer(tmp_path, 1, [checkpoint], enable_checkpointing=True).fit(agent, make_data())
    adapted = agent.kl_coefficient.value
    assert adapted != given.value == 0.01
    saved = torch.load(tmp_path / "stop.ckpt", weights_only=True)
    assert saved["kl_coefficient"] == {"value": adapted}
    make_trainer(tmp_path, 2).fit(agent, make_data(), ckpt_path=str(tmp_path / "stop.ckpt"))
    assert agent.kl_coefficient.value not in (adapted, 0.01)


@pytest.mark.slow
def test_a_second_run_from_python_begins_with_the_coefficient_that_is_given(tmp_path, tiny_folder):
    """As with learning rates: it is what that run says it was made of."""
    agent = make_agent(tiny_folder, kl_reward=AdaptiveKL(0.01, target=1e-9, horizon=100))
    for _ in range(2):
        trainer = make_trainer(tmp_path, 1)
        trainer.fit(agent, make_data())
        assert float(trainer.callback_metrics["kl/coefficient"]) == pytest.approx(0.01)
        assert agent.kl_coefficient.value != 0.01


@pytest.mark.slow
def test_the_summary_names_the_weights_that_played_last(tmp_path, tiny_folder):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", filename="newest", every_n_epochs=2, save_on_train_epoch_end=True
    )
    trainer = make_trainer(tmp_path, 3, [RunSummary(), checkpoint], enable_checkpointing=True)
    trainer.fit(make_agent(tiny_folder), make_data())
    summary = json.loads((tmp_path / "summary.json").read_text())
    saved = torch.load(tmp_path / "saved" / "final.ckpt", weights_only=True)
    assert (tmp_path / "saved" / "final.ckpt").samefile(summary["checkpoint"])
    assert saved["global_step"] == trainer.global_step == 6
    for when in ("before", "after"):
        assert summary[when]["episodes"] == 8
        assert summary[when]["success_low"] <= summary[when]["success"] <= summary[when]["success_high"]
        assert 1 <= summary[when]["mean_turns"] <= 3
        assert 0 <= summary[when]["valid_action_ratio"] <= 1
        assert summary[when]["env"]["progression"] == summary[when]["success"] == summary[when]["return"]


@pytest.mark.slow
def test_the_newest_checkpoint_is_that_of_the_end_where_the_last_iteration_was_not_one_to_save(tmp_path, tiny_folder):
    saving = RunCheckpoints(every_n_epochs=2, keep=2, dirpath=str(tmp_path / "saved"))
    trainer = make_trainer(tmp_path, 3, [RunSummary(), saving], enable_checkpointing=True)
    trainer.fit(make_agent(tiny_folder), make_data())
    final = tmp_path / "saved" / "iteration-00003.ckpt"
    assert (tmp_path / "saved" / "last.ckpt").resolve() == final.resolve()
    assert final.samefile(json.loads((tmp_path / "summary.json").read_text())["checkpoint"])
    kept = {path.name for path in final.parent.iterdir()}
    assert kept == {"iteration-00002.ckpt", "iteration-00003.ckpt", "last.ckpt"}
    assert torch.load(final, weights_only=True)["global_step"] == trainer.global_step == 6


@pytest.mark.slow
def test_the_summary_names_the_newest_checkpoint_and_not_the_best(tmp_path, tiny_folder):
    worse_and_worse = L.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", monitor="kl/reference", mode="min", save_top_k=3, save_on_train_epoch_end=True
    )
    trainer = make_trainer(tmp_path, 3, [RunSummary(), worse_and_worse], enable_checkpointing=True)
    trainer.fit(make_agent(tiny_folder, lr_actor=1e-2), make_data())
    named = json.loads((tmp_path / "summary.json").read_text())["checkpoint"]
    assert torch.load(named, weights_only=True)["global_step"] == trainer.global_step == 6
    assert not Path(worse_and_worse.best_model_path).samefile(named)


@pytest.mark.slow
def test_a_summary_stays_with_its_run(tmp_path, tiny_folder, monkeypatch):
    """The copy at the root names its version; a second start that fails takes nothing of the first for its own."""

    def fit(fails):
        data = make_data()
        if fails:
            monkeypatch.setattr(Collector, "collect", Mock(side_effect=RuntimeError("no rollout")))
        logger = CSVLogger(tmp_path, name="logs")
        make_trainer(tmp_path, 1, [RunSummary(), TurnLog()], logger=logger).fit(make_agent(tiny_folder), data)

    fit(fails=False)
    with pytest.raises(RuntimeError, match="no rollout"):
        fit(fails=True)
    first = tmp_path / "logs" / "version_0" / "summary.json"
    assert (tmp_path / "summary.json").read_bytes() == first.read_bytes()
    assert json.loads(first.read_text())["version"] == "logs/version_0"
    shown = find_run(tmp_path)
    assert (shown.folder.name, shown.summary) == ("version_1", None)
    assert find_run(tmp_path / "logs" / "version_0").summary == first


@pytest.mark.slow
def test_a_start_in_the_same_folder_sets_the_earlier_summary_aside(tmp_path, tiny_folder):
    (tmp_path / "summary.json").write_text('{"seed": 7}')
    make_trainer(tmp_path, 1, [RunSummary()]).fit(make_agent(tiny_folder), make_data())
    assert json.loads((tmp_path / "earlier_summary.json").read_text()) == {"seed": 7}
    assert json.loads((tmp_path / "summary.json").read_text())["version"] == "."


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"precision": "16-true"}, "trainer.precision"),
        ({"max_steps": 3}, "trainer.max_steps"),
    ],
)
def test_settings_that_would_break_an_iteration_are_refused(tmp_path, tiny_folder, settings, key):
    with pytest.raises(ValueError, match=key):
        check_trainer(make_trainer(tmp_path, 2, **settings), make_data().steps_per_iteration)
