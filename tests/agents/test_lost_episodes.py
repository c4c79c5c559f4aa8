"""Training beside environments that fail: what is trained on of an episode that broke off."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch

from lightning_agentrl.advantages import GRPO, AdvantageEstimator, DualDiscountGAE, ReinforcePlusPlus
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import EnvConfig, FaultLimits, GroupRollout, Prepared, RawParser, TurnInteraction
from lightning_agentrl.types import Rollout, StopReason
from tests.agents import processes
from tests.agents.harness import grouped, make_data, make_trainer
from tests.agents.processes import assert_same, read
from tests.rollout.scripted import FREE_TEXT, Scripted


class Brittle(Scripted):
    """Fails in the second step of some episodes."""

    def step(self, action: str) -> Any:
        if self.count == 1 and self.key % 3 == 0:
            raise OSError("gone")
        return super().step(action)


gymnasium.register("Brittle-v0", Brittle)


class Watched(PPOAgent):
    """Keeps what was collected and what is trained on."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[tuple[Rollout, Prepared]] = []

    def prepare(self, rollout: Rollout) -> Prepared:
        prepared = super().prepare(rollout)
        self.seen.append((rollout, prepared))
        return prepared


def fit(
    path: Any, folder: Any, advantage: AdvantageEstimator, warm_up: bool = False, **settings: Any
) -> list[tuple[Rollout, Prepared]]:
    critic = SharedCritic() if advantage.needs_values or warm_up else None
    agent = Watched(str(folder), critic=critic, advantage=advantage, **grouped({"kl_reward": 0.0, "lr_actor": 1e-3}))
    data = make_data(
        env=EnvConfig("Brittle-v0", retries=0),
        prompt=FREE_TEXT,
        interaction=TurnInteraction(4, RawParser()),
        faults=FaultLimits(share=1.0),
        **settings,
    )
    warm = [CriticWarmup(rollouts=1, rounds=1, fraction=1.0, min_explained_variance=None)] if warm_up else []
    make_trainer(path, 2, warm).fit(agent, data)
    assert all(parameter.isfinite().all() for parameter in agent.parameters())
    return agent.seen


def lost(rollout: Rollout) -> set[tuple[int, int]]:
    return {(turn.env, turn.episode) for turn in rollout.turns if turn.stop is StopReason.ENV_FAULT}


def test_with_values_a_lost_episode_is_bootstrapped(tmp_path, tiny_folder):
    seen = fit(tmp_path, tiny_folder, DualDiscountGAE())
    assert lost(seen[1][0])
    for rollout, prepared in seen:
        assert prepared.rollout.samples == rollout.samples
        for row, sample in enumerate(rollout.samples):
            if sample.turns[-1].stop is StopReason.ENV_FAULT and rollout is not seen[0][0]:  # values begin at 0
                assert prepared.rollout.bootstrap_values[row] != 0
        assert prepared.metrics["env/lost/OSError"] == sum(len(turn.lost) for turn in rollout.turns)


@pytest.mark.slow
@pytest.mark.parametrize("in_groups", [False, True])
def test_without_values_only_whole_episodes_and_groups_are_trained_on(in_groups, tmp_path, tiny_folder):
    groups = GroupRollout(size=2, per_rollout=4, mini_batches=2)
    seen = (
        fit(tmp_path, tiny_folder, GRPO(), groups=groups)
        if in_groups
        else fit(tmp_path, tiny_folder, ReinforcePlusPlus())
    )
    assert any(lost(rollout) for rollout, _ in seen)
    for rollout, prepared in seen:
        gone = lost(rollout)
        broken = {turn.group for turn in rollout.turns if (turn.env, turn.episode) in gone}
        kept = [
            turn
            for turn in rollout.turns
            if (turn.group not in broken if in_groups else (turn.env, turn.episode) not in gone)
        ]
        assert list(prepared.rollout.turns) == kept
        if not in_groups:
            trained = prepared.rollout.advantages[prepared.rollout.action_mask]
            assert torch.allclose(trained.mean(), torch.zeros((), dtype=trained.dtype), atol=1e-6)  # whitened


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [DualDiscountGAE(), GRPO()], ids=["values", "none"])
def test_a_warm_up_fits_the_critic_to_what_is_lost_only_where_a_value_stands_for_the_rest(
    advantage, tmp_path, tiny_folder
):
    groups = GroupRollout(size=2, per_rollout=4, mini_batches=2)
    (rollout, prepared), *_ = fit(tmp_path, tiny_folder, advantage, warm_up=True, groups=groups)
    gone = lost(rollout)
    broken = {turn.group for turn in rollout.turns if (turn.env, turn.episode) in gone}
    assert broken
    kept = [turn for turn in rollout.turns if advantage.needs_values or turn.group not in broken]
    assert list(prepared.rollout.turns) == kept


@pytest.mark.slow
def test_returns_that_there_are_not_are_not_told_as_0(tmp_path, tiny_folder):
    """By an estimator that compares groups, for broken ones; PopArt would follow them."""
    groups = GroupRollout(size=2, per_rollout=4, mini_batches=2)
    seen = fit(tmp_path, tiny_folder, GRPO(), warm_up=True, groups=groups)
    assert any(lost(rollout) for rollout, _ in seen)
    for _, prepared in seen:
        returns = prepared.rollout.returns[prepared.rollout.action_mask]
        assert prepared.metrics["critic/return_mean"] == pytest.approx(float(returns.mean()))
        assert prepared.metrics["critic/return_std"] == pytest.approx(float(returns.std(correction=0)), abs=1e-7)


@pytest.mark.slow  # two processes
def test_a_process_whose_groups_are_all_lost_takes_the_steps_of_the_others(tmp_path, exact_folder):
    """Each has one group of a rollout, of which half do not begin, in the warm-up too. Two end as one does."""
    loop = "{class_path: TurnInteraction, init_args: {max_reply_tokens: 4, invalid_penalty: 0, parser: RawParser}}"
    arguments = {
        "env": "{id: 'tests.rollout.test_faults:Shut-v0', retries: 0}",
        "groups": "{size: 2, per_rollout: 2, mini_batches: 2}",
        "turns_per_env": "8",
        "mini_batch_turns": "128",
        "interaction": loop,
        "faults": "{share: 1.0}",
        "seed": "40",  # of seven rollouts each has a group that begins, and some have one that does not
    }
    given = [part for key, value in arguments.items() for part in (f"--data.init_args.{key}", value)]
    given += ["--model.init_args.advantage", "GRPO"]
    one, two = (
        processes.fit(tmp_path / str(count), exact_folder, SeparateCritic.__name__, count, *given) for count in (1, 2)
    )
    assert read(two)["global_step"] == 10
    assert_same(read(one), read(two))
    lost = [row["env/lost/OSError"] for row in processes.metrics(tmp_path / "2") if "env/lost/OSError" in row]
    assert sum(lost) > 0
