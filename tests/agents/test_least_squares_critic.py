"""A critic by least squares in whole runs: fitted to the returns, after each step, beside a policy that is trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.agents.scoring import action_rows, row_states, to_columns
from lightning_agentrl.agents.update import turn_shares
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.losses import first_token_weights
from lightning_agentrl.models.critic import LeastSquaresCritic
from lightning_agentrl.models.regression import RunningRegression
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer


@given(turns=st.lists(st.lists(st.integers(0, 4), max_size=6).map(sorted), min_size=1, max_size=4), data=st.data())
def test_all_turns_count_alike(turns, data):
    """A turn is what has one number in one row; tokens off the mask count nothing."""
    width = max(map(len, turns)) or 1
    ids, mask = torch.full((len(turns), width), -1), torch.zeros(len(turns), width, dtype=torch.bool)
    for row, numbers in enumerate(turns):
        ids[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        mask[row, : len(numbers)] = torch.tensor([data.draw(st.booleans()) for _ in numbers], dtype=torch.bool)
    shares = turn_shares(mask, ids)
    assert not shares[~mask].any()
    for row in range(len(turns)):
        for turn in set(ids[row][mask[row]].tolist()):
            own = shares[row][mask[row] & (ids[row] == turn)]
            assert own.tolist() == pytest.approx([1 / len(own)] * len(own))


@pytest.mark.filterwarnings("ignore")
def test_values_are_a_regression_on_all_rollouts_so_far(tmp_path, tiny_folder):
    """The policy stands still, so its states can be read afterwards; each iteration forgets three tenths."""
    kept, agent = KeepRollouts(), make_agent(tiny_folder, LeastSquaresCritic(forget=0.3), lr_actor=0.0)
    make_trainer(tmp_path, 3, [kept]).fit(agent, make_data())
    alone = RunningRegression(agent.actor.hidden_size, 1.0)
    assert len(kept.rollouts) == 3
    for rollout in kept.rollouts:
        states = row_states(agent.actor.float(), action_rows(rollout), agent.reader())
        shares = turn_shares(rollout.trained_mask, rollout.turn_ids)[rollout.action_mask]
        values = to_columns(alone(states), rollout.action_mask)
        torch.testing.assert_close(values, rollout.scores.values, rtol=1e-3, atol=1e-4, check_dtype=False)
        starts = first_token_weights(rollout.action_mask, rollout.turn_ids, 2.0)[rollout.action_mask] == 2.0
        alone.take_in(states, rollout.returns[rollout.action_mask], shares, starts)
        alone.fit(lambda x: x, keep=0.7)
    assert kept.rollouts[2].scores.values.any()


def parameters(agent) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in agent.actor.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_a_warm_up_fits_the_critic_and_leaves_the_actor(tmp_path, tiny_folder):
    """There is nothing in it for an optimizer to do; then the policy is trained, and its trunk by nothing else."""
    warmup = CriticWarmup(rollouts=2, rounds=2, fraction=0.5, min_explained_variance=None)
    agent = make_agent(tiny_folder, LeastSquaresCritic())
    trainer = make_trainer(tmp_path, 2, [warmup])
    trainer.fit(agent, make_data())
    start = make_agent(tiny_folder, LeastSquaresCritic())
    make_trainer(tmp_path, 0).fit(start, make_data())
    assert torch.equal(parameters(agent), parameters(start))
    assert agent.critic.regression.weights.any()
    assert trainer.global_step == 4
    assert "actor" in [group["name"] for group in trainer.optimizers[0].param_groups]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(agent, make_data())
    assert not torch.equal(parameters(agent), parameters(start))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"forget": 1.5}, "forget"),
        ({"forget": -0.1}, "forget"),
        ({"ridge": 0.0}, "ridge"),
        ({"ridge": float("inf")}, "ridge"),
    ],
)
def test_settings_without_a_solution_are_refused(arguments, key):
    with pytest.raises(ValueError, match=rf"model\.init_args\.critic\.init_args\.{key} must be"):
        LeastSquaresCritic(**arguments)
