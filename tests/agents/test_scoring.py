"""Passes of models over a rollout before training on it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.scoring import bootstrap_rows
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import GroupRollout
from lightning_agentrl.types import Rollout
from tests.agents.harness import KeepRollouts, grouped, make_agent, make_data, make_trainer
from tests.inputs import text_row
from tests.types.samples import growing, windowed


def test_the_state_behind_the_last_turn_of_an_episode_is_read_at_its_last_token() -> None:
    assert bootstrap_rows(Rollout.from_samples(growing())) == {0: text_row((1, 92), (1,))}
    cut = bootstrap_rows(Rollout.from_samples(windowed()))
    assert cut == {2: text_row((1, 91), (1,)), 3: text_row((1, 2, 90), (2,))}  # the one before has ended


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"critic": SharedCritic(), "kl_reward": 0.0}, 1),  # one for policy and values
        ({"critic": SharedCritic(), "kl_reward": 0.1}, 2),
        ({"critic": SeparateCritic(), "kl_reward": 0.1}, 3),
        ({"kl_reward": 0.0, "kl_loss": 0.1}, 2),
        ({"kl_reward": 0.0}, 1),
    ],
)
def test_progress_of_scoring_ends_at_its_total(tiny_folder, tmp_path, settings: dict[str, Any], passes) -> None:
    if "critic" in settings:
        agent, data = make_agent(tiny_folder, **settings), make_data()
    else:
        agent = PPOAgent(str(tiny_folder), critic=None, advantage=GRPO(), **grouped({"lr_actor": 1e-3, **settings}))
        data = make_data(groups=GroupRollout(size=2, per_rollout=2, mini_batches=2))
    reported: list[tuple[int, int]] = []
    agent.clock.listeners.append(
        lambda stage, done, total: reported.append((done, total)) if stage == "score" else None
    )
    make_trainer(tmp_path, 1, [keep := KeepRollouts()]).fit(agent, data)
    ends = len(bootstrap_rows(keep.rollouts[-1])) if "critic" in settings else 0
    total = passes * len(keep.rollouts[-1]) + ends
    assert reported[-1] == (total, total)
