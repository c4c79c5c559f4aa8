"""A critic by least squares in whole runs: fitted to the returns, after each step, beside a policy that is trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.agents.scoring import action_rows, row_states
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.losses import first_tokens, of_first_tokens
from lightning_agentrl.models.critic import LeastSquaresCritic, RunningRegression
from tests.agents.harness import KeepRollouts, make_agent, make_data, make_trainer


@given(turns=st.lists(st.lists(st.integers(0, 4), max_size=6).map(sorted), min_size=1, max_size=4), data=st.data())
def test_the_value_of_a_turns_beginning_stands_for_the_turn(turns, data):
    """A turn is what has one number in one row; tokens off the mask have no value."""
    width = max(map(len, turns)) or 1
    ids, mask = torch.full((len(turns), width), -1), torch.zeros(len(turns), width, dtype=torch.bool)
    for row, numbers in enumerate(turns):
        ids[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        mask[row, : len(numbers)] = torch.tensor([data.draw(st.booleans()) for _ in numbers], dtype=torch.bool)
    values = torch.randn(mask.shape)
    spread = of_first_tokens(values, mask, ids)
    assert not spread[~mask].any()
    for row in range(len(turns)):
        for turn in set(ids[row][mask[row]].tolist()):
            own = mask[row] & (ids[row] == turn)
            assert (spread[row][own] == values[row][own][0]).all()


@pytest.mark.filterwarnings("ignore")
def test_values_are_a_regression_on_all_rollouts_so_far(tmp_path, tiny_folder):
    """The policy stands still, so its states can be read afterwards; each iteration forgets three tenths."""
    kept, agent = KeepRollouts(), make_agent(tiny_folder, LeastSquaresCritic(forget=0.3), lr_actor=0.0)
    make_trainer(tmp_path, 3, [kept]).fit(agent, make_data())
    alone = RunningRegression(agent.actor.hidden_size, 1.0)
    assert len(kept.rollouts) == 3
    for rollout in kept.rollouts:
        mask, begins = rollout.action_mask, first_tokens(rollout.action_mask, rollout.turn_ids)
        states = row_states(agent.actor.float(), action_rows(rollout), agent.reader)[begins[mask]]
        torch.testing.assert_close(alone(states), rollout.scores.values[begins].float(), rtol=1e-3, atol=1e-4)
        assert torch.equal(rollout.scores.values, of_first_tokens(rollout.scores.values, mask, rollout.turn_ids))
        alone.take_in(states, rollout.returns[begins])
        alone.fit(lambda x: x, keep=0.7)
    assert kept.rollouts[2].scores.values.any()


def parameters(agent) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in agent.actor.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_a_warm_up_fits_the_critic_and_leaves_the_actor(tmp_path, tiny_folder):
    """There is nothing in it for an optimizer to do; then the policy is trained, and its trunk by nothing else."""
    warmup = CriticWarmup(rollouts=2, rounds=2, fraction=0.5, min_explained_variance=None)
    agent = make_agent(tiny_folder, LeastSquaresCritic(forget=1.0))
    trainer = make_trainer(tmp_path, 2, [warmup])
    trainer.fit(agent, make_data())
    start = make_agent(tiny_folder, LeastSquaresCritic())
    make_trainer(tmp_path, 0).fit(start, make_data())
    assert torch.equal(parameters(agent), parameters(start))
    assert agent.critic.regression.weights.any()
    assert agent.critic.regression.moments[-2, -2] == 2 * 16  # turns: nothing is forgotten while the policy is the same
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
    ],
)
def test_settings_without_a_solution_are_refused(arguments, key):
    with pytest.raises(ValueError, match=rf"model\.init_args\.critic\.init_args\.{key} must be"):
        LeastSquaresCritic(**arguments)
