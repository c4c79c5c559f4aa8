"""Agents on group rollouts: training without a critic, warm-up, exact resume, and what is refused."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import lightning as L
import pytest
import torch

import lightning_agentrl.advantages
from lightning_agentrl.advantages import (
    GRPO,
    AdvantageEstimator,
    DualDiscountGAE,
    MaxRL,
    PassAtK,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.callbacks.run_folder import facts
from lightning_agentrl.commands.plan import RunPlan
from lightning_agentrl.losses import AdaptiveKL, DropEqualScores, PPOClip
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.rollout import (
    FullMemory,
    GroupRollout,
    RolloutDataModule,
    TurnInteraction,
    WindowMemory,
)
from tests.agents.harness import ByLength, KeepRollouts, grouped, make_data, make_trainer

ESTIMATORS = [
    cls
    for name in lightning_agentrl.advantages.__all__
    if inspect.isclass(cls := getattr(lightning_agentrl.advantages, name))
    and issubclass(cls, AdvantageEstimator)
    and not inspect.isabstract(cls)
]
AHEAD = GroupRollout(size=3, per_rollout=2, mini_batches=2, ahead=4, ahead_turns=1)


def group_data(groups: GroupRollout | None = AHEAD, **kwargs) -> RolloutDataModule:
    return make_data(groups=groups, **kwargs)


def agent_of(folder, advantage: AdvantageEstimator, **kwargs) -> PPOAgent:
    return PPOAgent(str(folder), **grouped({"advantage": advantage, "kl_reward": 0.0, "lr_actor": 1e-3} | kwargs))


FORKING = {cls for cls in ESTIMATORS if cls().needs_forks}
NEEDS = {
    (cls.needs_values, cls.needs_groups, cls.needs_greedy_baseline, cls.needs_sum_pi_squared, cls in FORKING): cls
    for cls in ESTIMATORS
}


def case(cls, memory):
    """Of the estimators that need the same, one is enough."""
    kept = cls in NEEDS.values() and isinstance(memory, WindowMemory)
    return pytest.param(cls, memory, marks=() if kept else pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "memory"),
    [*(case(cls, WindowMemory(1)) for cls in ESTIMATORS), *(case(cls, FullMemory()) for cls in NEEDS.values())],
)
def test_every_estimator_trains_on_groups(tmp_path, tiny_folder, estimator, memory):
    """In growing samples one of each kind: how its numbers depend on the layout is told by the conformance suite."""
    groups = replace(AHEAD, ahead=0) if estimator in FORKING else AHEAD  # which they refuse
    interaction = TurnInteraction(4, ByLength(), invalid_penalty=0.0)
    keep, data = KeepRollouts(), group_data(groups, memory=memory, interaction=interaction)
    agent = agent_of(tiny_folder, estimator())
    trainer = make_trainer(tmp_path, 2, [keep])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(agent, data)
    assert trainer.global_step == 4
    assert (agent.critic is not None) == estimator.needs_values
    for rollout in keep.rollouts:
        assert rollout.advantages.isfinite().all()
        assert (rollout.greedy_scores is not None) == estimator.needs_greedy_baseline
        assert rollout.groups.unique().numel() == 2
        assert rollout.episode.unique().numel() == 6
    if estimator is not PassAtK:  # which needs a single winner
        assert any(rollout.advantages.abs().max() > 0 for rollout in keep.rollouts)
    assert {"rollout/equal_groups", "rollout/group_std", "rollout/policy_lag"} <= trainer.callback_metrics.keys()
    assert (float(trainer.callback_metrics["rollout/policy_lag"]) > 0) == (groups is AHEAD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("advantage", "warm_up", "stops"),
    [(GRPO(), False, [2]), (DualDiscountGAE(), True, [1, 3])],
)
def test_a_resumed_run_equals_one_run(tmp_path, tiny_folder, advantage, warm_up, stops):
    """Stopped while episodes are paused, also inside a warm-up."""

    def fit(epochs, ckpt_path=None, save=""):
        callbacks = [CriticWarmup(rollouts=2, rounds=1, fraction=1.0)] if warm_up else []
        if save:
            callbacks.append(L.pytorch.callbacks.ModelCheckpoint(tmp_path, save, save_on_train_epoch_end=True))
        agent = agent_of(tiny_folder, advantage, critic=SeparateCritic() if warm_up else None)
        make_trainer(tmp_path, epochs, callbacks, enable_checkpointing=bool(save)).fit(
            agent, group_data(), ckpt_path=ckpt_path
        )
        return agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit(5)
        for stop_after in stops:
            fit(stop_after, save=f"stop{stop_after}")
            checkpoint = tmp_path / f"stop{stop_after}.ckpt"
            saved = torch.load(checkpoint, weights_only=True)["RolloutDataModule"]
            members = [member for of_group in saved["sessions"].values() for member in of_group]
            assert any(member["session"] is not None for member in members)
            resumed = fit(5, ckpt_path=str(checkpoint))
            for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
                assert torch.equal(a, b), (stop_after, name)


@pytest.mark.parametrize(
    ("advantage", "groups", "message"),
    [
        (GRPO(), None, r"GRPO needs several episodes from each start state; set data.init_args.groups"),
        (ReMax(), None, r"ReMax needs a greedy episode from each start state; set data.init_args.groups"),
        (GRPO(), GroupRollout(1, 4), r"GRPO compares .* data.init_args.groups.size is 1; set at least 2"),
    ],
)
def test_estimators_without_what_they_compare_are_refused(tmp_path, tiny_folder, advantage, groups, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, 1).fit(agent_of(tiny_folder, advantage), group_data(groups, num_envs=16))


@pytest.mark.slow
def test_filtered_groups_are_left_out_of_the_update(tmp_path, tiny_folder):
    """Also where nothing is left, as where all scores are equal: then nothing moves."""

    class Trained(L.Callback):
        def __init__(self) -> None:
            self.groups, self.turns = set(), 0

        def on_train_batch_start(self, trainer, agent, batch, batch_idx):
            self.groups |= {turn.group for turn in batch.rollout.turns}
            self.turns += len(batch.rollout.turns)

    def fit(parser):
        keep, trained = KeepRollouts(), Trained()
        agent = agent_of(tiny_folder, GRPO(), group_filter=DropEqualScores(), weight_decay=0.0)
        data = group_data(GroupRollout(3, 6, 2), interaction=TurnInteraction(4, parser))
        trainer = make_trainer(tmp_path, 1, [keep, trained])
        trainer.fit(agent, data)
        (rollout,) = keep.rollouts
        scores = {group: set(rollout.outcomes[rollout.groups == group].tolist()) for group in range(6)}
        apart = {group for group in scores if len(scores[group]) > 1}
        assert trained.groups == apart
        assert trained.turns == sum(turn.group in apart for turn in rollout.turns)
        assert float(trainer.callback_metrics["rollout/kept_groups"]) == len(apart) / 6
        return agent, apart

    agent, apart = fit(ByLength())
    assert 0 < len(apart) < 6
    agent, apart = fit(None)  # every reply is invalid, so all groups are equal
    assert not apart
    fresh = load_causal_lm(str(tiny_folder)).double()
    assert all(torch.equal(a, b) for a, b in zip(agent.actor.lm.parameters(), fresh.parameters(), strict=True))


@pytest.mark.slow
def test_what_is_whitened_are_the_advantages_that_are_trained_on(tmp_path, tiny_folder):
    """Groups that a filter leaves out would make the others' larger, the more of them there are."""

    class Trained(L.Callback):
        def __init__(self) -> None:
            self.advantages: list[torch.Tensor] = []

        def on_train_batch_start(self, trainer, agent, batch, batch_idx):
            self.advantages.append(batch.rollout.advantages[batch.rollout.trained_mask])

    keep, trained = KeepRollouts(), Trained()
    agent = agent_of(tiny_folder, ReinforcePlusPlusBaseline(), group_filter=DropEqualScores())
    data = group_data(GroupRollout(3, 6, 2), interaction=TurnInteraction(4, ByLength()))
    trainer = make_trainer(tmp_path, 1, [keep, trained])
    trainer.fit(agent, data)
    assert 0 < float(trainer.callback_metrics["rollout/kept_groups"]) < 1
    variance, mean = torch.var_mean(torch.cat(trained.advantages))
    assert abs(float(mean)) < 1e-6
    assert float(variance) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_an_adaptive_coefficient_counts_the_turns_that_its_kl_is_measured_on(tmp_path, tiny_folder):
    """Also those of groups that a filter leaves out: here of all, since every reply is invalid."""
    keep = KeepRollouts()
    agent = agent_of(tiny_folder, GRPO(), group_filter=DropEqualScores(), kl_reward=AdaptiveKL(0.01, horizon=1000))
    data = group_data(GroupRollout(3, 2, 2), interaction=TurnInteraction(4, None))
    make_trainer(tmp_path, 1, [keep]).fit(agent, data)
    (rollout,) = keep.rollouts
    assert agent.kl_coefficient.value == pytest.approx(0.01 * (1 - 0.2 * len(rollout.turns) / 1000))  # the KL is 0


@pytest.mark.parametrize(
    ("kl", "penalty", "keys"),
    [
        (0.001, 0.0, r"model\.init_args\.kl\.reward"),
        (AdaptiveKL(), 0.0, r"model\.init_args\.kl\.reward"),
        (0.0, 0.1, r"data\.init_args\.interaction\.init_args\.invalid_penalty"),
        (0.001, 0.1, r"model\.init_args\.kl\.reward and data\.init_args\.interaction\.init_args\.invalid_penalty"),
    ],
)
def test_scores_below_0_are_refused_before_the_run_where_they_have_no_meaning(tmp_path, tiny_folder, kl, penalty, keys):
    data = group_data(interaction=TurnInteraction(4, invalid_penalty=penalty))
    with pytest.raises(ValueError, match=rf"MaxRL.*0.*{keys}.*0.*model\.i"):
        make_trainer(tmp_path, 1).fit(agent_of(tiny_folder, MaxRL(), kl_reward=kl), data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"kl_reward": 0.001}, True),
        ({"kl_reward": 0.001, "advantage": PassAtK()}, True),
        ({"kl_reward": 0.001, "group_filter": DropEqualScores()}, False),
        ({"kl_loss": 0.001}, False),
        ({"kl_reward": 0.001, "advantage": PassAtK(divide_by_std=False)}, False),
    ],
)
def test_a_kl_that_counts_as_much_as_a_reward_is_told(tmp_path, tiny_folder, settings, warned):
    agent = agent_of(tiny_folder, **{"advantage": GRPO(), **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RunPlan(make_trainer(tmp_path, 1), agent, group_data()).close()
    assert any("alone gives them full-size advantages" in str(each.message) for each in caught) == warned


def test_a_mean_over_groups_without_groups_is_refused(tmp_path, tiny_folder):
    agent = agent_of(tiny_folder, DualDiscountGAE(), policy_loss=PPOClip(aggregation="prompt-mean"))
    with pytest.raises(ValueError, match=r"prompt-mean.*model\.init_args\.policy_loss\.init_args\.aggregation"):
        make_trainer(tmp_path, 1).fit(agent, group_data(None, num_envs=16))


def test_a_filter_without_groups_is_refused(tmp_path, tiny_folder):
    agent = agent_of(tiny_folder, DualDiscountGAE(), group_filter=DropEqualScores())
    with pytest.raises(ValueError, match=r"DropEqualScores.*model.init_args.group_filter"):
        make_trainer(tmp_path, 1).fit(agent, group_data(None, num_envs=16))


def test_a_single_episode_and_a_greedy_one_are_enough_for_remax(tmp_path, tiny_folder):
    keep = KeepRollouts()
    make_trainer(tmp_path, 1, [keep]).fit(agent_of(tiny_folder, ReMax()), group_data(GroupRollout(1, 6, 2)))
    (rollout,) = keep.rollouts
    to_go = rollout.advantages + rollout.greedy_scores[:, None]
    first = [i for i, sample in enumerate(rollout.samples) if sample.turns[0].index == 0]
    scores = {}
    for turn in rollout.turns:
        scores[turn.group] = scores.get(turn.group, 0.0) + turn.reward
    for i in first:
        assert float(to_go[i, 0]) == pytest.approx(scores[rollout.samples[i].turns[0].group], abs=1e-6)


@pytest.mark.slow
def test_progress_counts_episodes(tmp_path, tiny_folder):
    """Those that come home and greedy ones, also where an episode was played ahead to its end."""
    seen: list[tuple[int, int]] = []

    class Listen(L.Callback):
        def on_fit_start(self, trainer, agent):
            agent.clock.listeners.append(
                lambda stage, done, total: seen.append((done, total)) if stage == "collect" else None
            )

    data = group_data(interaction=TurnInteraction(4, ByLength()))
    make_trainer(tmp_path, 4, [Listen()]).fit(agent_of(tiny_folder, ReMax()), data)
    assert seen == [(done, 8) for done in range(9)] * 4
    assert data.sizes.unit == "episodes"


def test_the_plan_and_the_record_tell_of_groups(tmp_path, tiny_folder):
    plan = RunPlan(make_trainer(tmp_path, 7), agent_of(tiny_folder, GRPO()), group_data())
    text = plan.text()
    plan.close()
    for line in ("2 groups * 3 = 6", "2, each on a share of 1/2 of the turns"):
        assert line in text
    assert "7, 42 episodes" in text
    agent, trainer = agent_of(tiny_folder, GRPO()), make_trainer(tmp_path, 1)
    trainer.fit(agent, group_data())
    assert facts(trainer, agent)["rollout"]["groups"]["size"] == 3
