"""Forks against exact values: how wrong are the values and advantages of a critic, and those of episodes played on?

    python -m benchmarks.laboratory.forks                # three seeds; writes docs/results/forks.md
    python -m benchmarks.laboratory.forks --slip 0.3     # with noise in the game; prints only, as fewer iterations do

A policy learns key and door with GAE and a critic. Before its updates the states of the rollout are also valued by
forks, and both are compared with what dynamic programming gives for the policy as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional import spearman_corrcoef
from transformers.utils.logging import disable_progress_bar

from benchmarks.laboratory.arms import STEPS
from benchmarks.laboratory.cloning import PROMPT, Start, cloned
from benchmarks.laboratory.exact import Array, tables
from benchmarks.laboratory.fits import data_of, quiet_trainer
from benchmarks.laboratory.key_door import ACTIONS, STAY
from benchmarks.laboratory.policy import LastWord, PolicyReader
from benchmarks.laboratory.records import save
from lightning_agentrl.advantages import GAE, Forked
from lightning_agentrl.agents import KL, Needs, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout import TurnInteraction
from lightning_agentrl.types import Rollout

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "forks.md"
GAMMA, LAM, LIMIT, ENVS, TURNS_PLAYED = 0.97, 0.95, 400, 32, 256
SHOWN = (2, 5, 10)  # iterations
TEXT = """\
# Forks against exact values

[Forks](../estimators.md#forks) with four branches of each state, and the critic of GAE, in the game of [the
laboratory](laboratory.md) (horizon 12, replies of one word, no time limit that matters: {limit} turns), where the
values of the policy as it is are computed by dynamic programming. {seeds} seeds, {envs} environments, {turns} turns
in each iteration, gamma {gamma}, lambda {lam}; the critic is trained from zero with the policy, the forks change
nothing. Written by `python -m benchmarks.laboratory.forks`.

Squared errors times 10,000, before the updates of an iteration. *Ratio* is the squared error of GAE's advantages
over that of the forks' advantages. *Bias* is the mean of the forks' values minus the exact ones, in brackets in
standard errors over environments. *Turns* are those played for each recorded turn, *tokens* what they read and
said.

| iteration | V, critic | V, forks | A, GAE | A, forks | ratio | rank, GAE | rank, forks | bias | turns | tokens |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}
"""
Row = dict[str, float]


class Forking(PPOAgent):
    """PPO with a critic, whose rollouts are forked besides."""

    forked = Forked(branches=4, gamma=GAMMA, whiten=False)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(forks=self.forked.needs_forks)


class Compare(RolloutCallback):
    """Notes how far values and advantages of each iteration are from the exact ones."""

    def __init__(self, reader: PolicyReader, start: Start) -> None:
        self.reader, self.game = reader, tables(start.rules)
        self.index = {state.words: place for place, state in enumerate(self.game.states)}
        self.rows: list[Row] = []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        policy_SA = self.reader.table({name: x.detach() for name, x in agent.actor.lm.state_dict().items()})
        values_HS = self.game.values_within(policy_SA, GAMMA, LIMIT)
        states = np.array([self.index[turn.observation] for turn in rollout.turns])
        left = LIMIT - np.array([turn.index for turn in rollout.turns])
        actions = np.array([ACTIONS.index(turn.parsed_action or STAY) for turn in rollout.turns])
        after_NS = self.game.next_SAS[states, actions]
        exact_V = values_HS[left, states]
        exact_A = self.game.reward_SA[states, actions] + GAMMA * (after_NS * values_HS[left - 1]).sum(1) - exact_V
        assert rollout.state_values is not None and rollout.scores.values is not None  # noqa: PT018 - as needed
        forked_A, _ = agent.forked.estimate(rollout)
        gae_A, _ = GAE(GAMMA, LAM, whiten=False).estimate(rollout)
        forked_V, critic_V = (x[:, 0].double().numpy() for x in (rollout.state_values, rollout.scores.values))
        returns = [value for turn in rollout.turns for value in turn.branch_returns]
        owners = np.repeat(np.arange(len(states)), [len(turn.branch_returns) for turn in rollout.turns])
        off = np.array(returns) - exact_V[owners]
        per_state = np.bincount(owners, off, len(states)) / np.bincount(owners, minlength=len(states))
        per_env = np.bincount([turn.env for turn in rollout.turns], per_state) / (len(states) / ENVS)
        self.rows.append(
            {
                "critic_V": _error(critic_V, exact_V),
                "forks_V": _error(forked_V, exact_V),
                "gae_A": _error(gae_A[:, 0].numpy(), exact_A),
                "forks_A": _error(forked_A[:, 0].numpy(), exact_A),
                "gae_rank": _rank(gae_A, exact_A),
                "forks_rank": _rank(forked_A, exact_A),
                "bias": float(per_env.mean()),
                "bias_error": float(per_env.std(ddof=1) / ENVS**0.5),
                "turns": sum(turn.forked_turns for turn in rollout.turns) / len(states),
                "tokens": float(sum(len(sample.ids) for sample in rollout.samples)) / len(states),
            }
        )


def _error(found: Array, exact: Array) -> float:
    return float(((found - exact) ** 2).mean())


def _rank(advantages_BA: Tensor, exact: Array) -> float:
    return float(spearman_corrcoef(advantages_BA[:, 0].double(), torch.from_numpy(exact)))


def run(start: Start, model: Path, iterations: int, seed: int, turns: int = TURNS_PLAYED) -> list[Row]:
    """Return a row for each iteration."""
    reader = PolicyReader(model, tables(start.rules).states, PROMPT, start.reply_tokens)
    compare = Compare(reader, start)
    optim = Optim(lr_actor=5e-4, lr_critic=5e-4)
    agent = Forking(
        str(model),
        critic=SeparateCritic(),
        advantage=GAE(GAMMA, LAM),
        kl=KL(reward=0.0),
        entropy_bonus=0.0,
        optim=optim,
    )
    data = data_of(
        replace(start.env, kwargs={**start.env.kwargs, "limit": LIMIT}),
        PROMPT,
        TurnInteraction(start.reply_tokens, LastWord(), invalid_penalty=0.0),
        seed,
        num_envs=ENVS,
        turns_per_env=turns // ENVS,
        mini_batch_turns=turns // STEPS,
        engine=TransformersEngine(max_batch=ENVS),
    )
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(Path(folder), iterations, [compare]).fit(agent, data)
    return compare.rows


def kept(start: Start, model: Path, iterations: int, seed: int, folder: Path) -> list[Row]:
    """Return the rows of a run, which is made once; one that is there and is shorter than wanted is made anew."""
    file = folder / f"forks-slip{start.slip}-seed{seed}.json"
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    if len(rows) < iterations:
        rows = run(start, model, iterations, seed)
        save(file, json.dumps(rows))
    return rows[:iterations]


def page(every: Sequence[Sequence[Row]]) -> str:
    """Return the table of all seeds as Markdown, a line for each iteration that is told."""
    lines = []
    for iteration in SHOWN:
        rows = [rows[iteration - 1] for rows in every if len(rows) >= iteration]
        if not rows:
            continue
        mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        bias = mean["bias"] / (float(np.sqrt(np.mean([row["bias_error"] ** 2 for row in rows]))) / len(rows) ** 0.5)
        cells = [f"{1e4 * mean[name]:.0f}" for name in ("critic_V", "forks_V", "gae_A", "forks_A")]
        cells += [f"{mean['gae_A'] / mean['forks_A']:.1f}", f"{mean['gae_rank']:.2f}", f"{mean['forks_rank']:.2f}"]
        cells += [
            f"{1e4 * mean['bias']:+.0f} ({bias:+.1f})",
            f"{mean['turns']:.0f}",
            f"{mean['turns'] * mean['tokens']:.0f}",
        ]
        lines.append(f"| {iteration} | {' | '.join(cells)} |")
    return TEXT.format(
        seeds=len(every), envs=ENVS, turns=TURNS_PLAYED, gamma=GAMMA, lam=LAM, limit=LIMIT, rows="\n".join(lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Values and advantages of forks against exact ones.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--slip", type=float, default=0.0)
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "laboratory" / "models")
    given = parser.parse_args()
    start = Start(slip=given.slip)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    disable_progress_bar()
    model = cloned(start, given.models)
    every = [kept(start, model, given.iterations, seed, given.models.parent) for seed in range(given.seeds)]
    if not given.slip and given.iterations >= max(SHOWN):
        save(PAGE, page(every))
    print(page(every))


if __name__ == "__main__":
    main()
