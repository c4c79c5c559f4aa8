"""A user's own estimator and losses are called once before a run; those of the package are not."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.advantages import GAE, AdvantageEstimator
from lightning_agentrl.agents.trial import made_up_rollout, try_own_parts
from lightning_agentrl.commands.plan import RunPlan
from lightning_agentrl.losses import CISPO, ClipCov, PPOClip
from tests.agents.harness import make_agent, make_data, make_trainer


class Flat(AdvantageEstimator):
    """Every token gets the reward of its turn."""

    def estimate(self, rollout: Any, reduce: Any = None) -> Any:
        return rollout.rewards, rollout.rewards


class Short(Flat):
    def estimate(self, rollout: Any, reduce: Any = None) -> Any:
        return rollout.rewards[:, :1], rollout.rewards


class Broken(Flat):
    def estimate(self, rollout: Any, reduce: Any = None) -> Any:
        raise KeyError("advantage")


def test_own_parts_are_tried_in_a_dry_run_and_faulty_ones_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    plan = RunPlan(make_trainer(tmp_path, 3), make_agent(tiny_folder, advantage=Flat()), make_data())
    assert plan.tried == ["Flat.estimate"]
    assert "Flat.estimate, on a rollout of random numbers" in plan.text()
    plan.close()
    assert try_own_parts(make_agent(tiny_folder, advantage=GAE())) == []
    with pytest.raises(ValueError, match=r"Short\.estimate returned \[8, 1\] for a rollout of \[8, 3\]"):
        try_own_parts(make_agent(tiny_folder, advantage=Short()))
    with pytest.raises(ValueError, match=r"Broken\.estimate fails .* KeyError: 'advantage'"):
        try_own_parts(make_agent(tiny_folder, advantage=Broken()))


@pytest.mark.parametrize("loss", [PPOClip, CISPO, ClipCov])
def test_losses_of_the_package_pass_as_if_they_were_a_users(tiny_folder: Path, loss: Any) -> None:
    own = types.new_class(f"Own{loss.__name__}", (loss,))
    own.__module__ = "my_losses"
    agent = make_agent(tiny_folder, policy_loss=own())
    assert try_own_parts(agent) == [f"the policy loss of Own{loss.__name__}"]


def test_the_made_up_rollout_has_all_scores_and_whole_episodes() -> None:
    rollout = made_up_rollout()
    assert len(rollout) == 8
    assert rollout.groups is not None
    assert all(torch.isfinite(x).all() for x in rollout.tensors.values() if x.is_floating_point())
    assert [turn.terminated for turn in rollout.turns] == [False, True] * 4
