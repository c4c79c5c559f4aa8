"""The variance of policy gradients that different estimators make of the same rollouts, under fixed weights.

    make table

A policy is trained half-way, a critic is fitted to it, and then each of many independent rollouts gives one gradient
per estimator. What is there already is kept, so this can be stopped and goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor

from benchmarks.estimators.learn import (
    TWO_ROOMS,
    UntilLearned,
    make_agent,
    make_data,
    make_trainer,
)
from benchmarks.estimators.noise import bootstrap, cosine, relative_variance, variance_ratio
from lightning_agentrl.advantages import (
    GAE,
    GRPO,
    RLOO,
    AdvantageEstimator,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    whiten,
)
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows, to_columns
from lightning_agentrl.models.words import word_model
from lightning_agentrl.types import Rollout

TASK = replace(TWO_ROOMS, name="two rooms, replies of 1 to 4 tokens", episodes=64, max_reply_tokens=4)
HALF_WAY = 0.5  # reward at which the policy stops to learn
FITTING = 30  # iterations that the critic learns
ROLLOUTS, PIECE = 120, 20  # in all, and between two saves
NAMES: dict[str, AdvantageEstimator] = {
    "optimal token baseline": OptimalTokenBaseline(),
    "optimal token baseline, leave-one-out": OptimalTokenBaseline(leave_one_out=True),
    "RLOO": RLOO(),
    "GRPO": GRPO(),
    "GAE": GAE(),
    "GAE, lam 0.95": GAE(lam=0.95),
    "rewards to go, no baseline": ReinforcePlusPlus(whiten=False),
}
REFERENCE = "RLOO"


class WithAll(GAE):
    """So that the agent computes what any of the estimators needs."""

    needs_groups: ClassVar[bool] = True
    needs_sum_pi_squared: ClassVar[bool] = True


def policy_gradients(agent: PPOAgent, rollout: Rollout, advantages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of ``sum over tokens of advantage * log-prob / episodes`` [D], one for each kind of advantages [B, A].

    All of one pass, since they differ in the factors of the log-probs only.
    """
    parameters = list(agent.actor.lm.parameters())
    totals = {name: [torch.zeros_like(p) for p in parameters] for name in advantages}
    episodes = len(rollout.episode.unique())
    rows, reader = action_rows(rollout), agent.reader()
    with agent.evaluation_mode(), torch.enable_grad():
        for index in reader.micro_batches(rows):
            packed = reader.pack([rows[i] for i in index])
            scores = agent.actor.token_scores(agent.actor.hidden(packed), packed.targets, reader.temperature)
            micro = rollout.select(index)
            logps_BA = to_columns(scores.logps, micro.action_mask)
            for name, advantages_BA in advantages.items():
                factors_BA = advantages_BA[index, : logps_BA.shape[1]].to(logps_BA.dtype) / episodes
                parts = torch.autograd.grad(logps_BA, parameters, factors_BA, retain_graph=True)
                for total, part in zip(totals[name], parts, strict=True):
                    total += part
    return {name: torch.cat([total.flatten() for total in of_name]) for name, of_name in totals.items()}


class KeepGradients(RolloutCallback):
    """One gradient per estimator of each rollout."""

    def __init__(self) -> None:
        self.gradients: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        self.lengths: list[int] = []  # turns of episodes
        self.rewards: list[float] = []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        advantages = {}
        for name, estimator in NAMES.items():
            advantages[name], _ = estimator.estimate(rollout)
            if estimator.whiten:  # as agents do
                advantages[name] = whiten(advantages[name], rollout.action_mask)
        for name, gradient in policy_gradients(agent, rollout, advantages).items():
            self.gradients[name].append(gradient)
        self.lengths += [turn.index + 1 for turn in rollout.turns if turn.done]
        self.rewards += [turn.episode_return for turn in rollout.turns if turn.done]


def prepare(folder: Path) -> Path:
    """Train a policy half-way with GRPO; the folder of its model."""
    path = folder / "policy"
    if not path.exists():
        agent = make_agent(word_model(TASK.words, folder / "random"), GRPO())
        half_way = UntilLearned(HALF_WAY)
        make_trainer(folder, 100, [half_way]).fit(agent, make_data(TASK, GRPO(), seed=0))
        assert half_way.learned is not None, half_way.curve
        agent.tokenizer.save_pretrained(path)
        agent.actor.lm.save_pretrained(path)
    return path


def fit_critic(folder: Path, policy: Path) -> Path:
    """Train a critic while the policy stays as it is; the file of its weights."""
    path = folder / "critic.pt"
    if not path.exists():
        agent = make_agent(policy, WithAll())
        agent.optim = replace(agent.optim, lr_actor=0.0)
        make_trainer(folder, FITTING, []).fit(agent, make_data(TASK, agent.advantage, seed=1))
        assert agent.critic is not None
        torch.save(agent.critic.state_dict(), path)
    return path


def measure(folder: Path, policy: Path, critic: Path, piece: int) -> Path:
    """Gradients of some rollouts under weights that do not move; the file that holds them."""
    path = folder / f"gradients{piece}.pt"
    if not path.exists():
        agent = make_agent(policy, WithAll())
        agent.optim = replace(agent.optim, lr_actor=0.0, lr_critic=0.0)
        agent.configure_model()
        assert agent.critic is not None
        agent.critic.load_state_dict(torch.load(critic, weights_only=True))
        keep = KeepGradients()
        data = make_data(TASK, agent.advantage, seed=100 + piece, update_epochs=1)
        make_trainer(folder, PIECE, [keep]).fit(agent, data)
        told = {"lengths": keep.lengths, "rewards": keep.rewards}
        torch.save(told | {name: torch.stack(of_name) for name, of_name in keep.gradients.items()}, path)
    return path


def numbers(files: list[Path]) -> dict[str, Any]:
    """What the table shows, from the gradients of all pieces."""
    pieces = [torch.load(file, weights_only=True) for file in files]
    gradients = {name: torch.cat([piece[name] for piece in pieces]).double() for name in NAMES}
    products = {name: g_MD @ g_MD.T for name, g_MD in gradients.items()}
    count = len(products[REFERENCE])
    rows = {}
    other = products[REFERENCE]
    for name, own in products.items():
        both = gradients[name] @ gradients[REFERENCE].T
        rows[name] = {
            "variance": asdict(bootstrap(partial(relative_variance, own), count)),
            "ratio": asdict(bootstrap(partial(variance_ratio, own, other), count)),
            "cosine": asdict(bootstrap(partial(cosine, own, other, both), count)),
        }
    lengths = torch.tensor([x for piece in pieces for x in piece["lengths"]], dtype=torch.float64)
    return {
        "rollouts": count,
        "episodes": len(lengths),
        "reward": float(torch.tensor([x for piece in pieces for x in piece["rewards"]]).mean()),
        "turns": [float(lengths.quantile(q)) for q in (0.05, 0.5, 0.95)],
        "fitting": FITTING,
        "rows": rows,
    }


def run(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    policy = prepare(folder)
    critic = fit_critic(folder, policy)
    files = []
    for piece in range(ROLLOUTS // PIECE):
        files.append(measure(folder, policy, critic, piece))
        print(f"gradients of {(piece + 1) * PIECE} of {ROLLOUTS} rollouts", flush=True)
    return numbers(files)
