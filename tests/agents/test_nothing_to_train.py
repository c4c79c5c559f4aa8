"""A mini-batch without a token to train on moves nothing: neither Adam's momentum nor its weight decay."""

from __future__ import annotations

from itertools import pairwise

import lightning as L
import pytest
import torch

from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.losses import GroupFilter, OffPolicyCorrection
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout import GroupRollout
from tests.agents.harness import grouped, make_data, make_trainer
from tests.agents.processes import next_port


class RejectLater(OffPolicyCorrection):
    """Rejects all tokens from the second rollout on."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = 0

    def __call__(self, old_logps, rollout_logps, mask, reduce=None):
        self.rollouts += 1
        return None, mask if self.rollouts == 1 else torch.zeros_like(mask)

    def weights(self, log_ratio, mask, keep, reduce=None):
        return None


class KeepFirst(GroupFilter):
    """Keeps no group from the second rollout on."""

    def __init__(self) -> None:
        self.rollouts = 0

    def keep(self, scores):
        self.rollouts += 1
        return set(scores) if self.rollouts == 1 else set()


class Logging(PPOAgent):
    """Keeps the names of what it logs in an iteration."""

    names: frozenset[str] = frozenset()

    def log(self, name, value, *args, **kwargs):
        self.names |= {name}
        super().log(name, value, *args, **kwargs)


class Weights(L.Callback):
    """All weights before each step and after the last, and what was logged of each iteration."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []
        self.logged: list[set[str]] = []

    def on_train_batch_start(self, trainer, agent, batch, batch_idx):
        self.seen.append([p.detach().clone() for p in agent.parameters()])

    def on_train_epoch_end(self, trainer, agent):
        self.logged.append(agent.names)
        agent.names = frozenset()

    def on_train_end(self, trainer, agent):
        self.on_train_batch_start(trainer, agent, None, 0)

    @property
    def moved(self) -> list[bool]:
        return [any(not torch.equal(a, b) for a, b in zip(*both, strict=True)) for both in pairwise(self.seen)]


def rejecting(folder):
    settings = grouped({"lr_actor": 1e-3, "lr_critic": 1e-2})
    return Logging(str(folder), SeparateCritic(), correction=RejectLater(), **settings), make_data()


def filtering(folder):
    settings = grouped({"kl_reward": 0.0, "lr_actor": 1e-3})
    agent = Logging(str(folder), advantage=GRPO(), group_filter=KeepFirst(), **settings)
    return agent, make_data(groups=GroupRollout(size=2, per_rollout=2, mini_batches=2))


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("made", [rejecting, filtering])
def test_nothing_moves_where_no_token_is_trained(tmp_path, tiny_folder, monkeypatch, made, strategy):
    monkeypatch.setenv("MASTER_PORT", str(next_port()))
    weights, (agent, data) = Weights(), made(tiny_folder)
    trainer = make_trainer(tmp_path, 2, [weights], strategy=strategy)
    trainer.fit(agent, data)
    assert weights.moved == [True, True, False, False]
    assert trainer.global_step == agent.policy_version == 4  # such a step counts as one
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    first, second = weights.logged
    assert "grad_norm/actor" in first
    assert not {name for name in second if name.startswith(("grad_norm/", "policy/"))}
