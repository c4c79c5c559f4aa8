"""Training on small tasks until they are learned: one recipe for every estimator."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

import lightning_agentrl.advantages as advantages
from lightning_agentrl.advantages import GAE, AdvantageEstimator, PassAtK
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.models.words import word_model
from lightning_agentrl.rollout import (
    EnvConfig,
    GroupRollout,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types import Rollout

ITERATIONS = 150  # at most
RECENT = 5  # iterations whose mean reward has to reach the goal
GOAL = 0.9  # of the reward of a perfect policy, which is 1 in all tasks here
LEARNING_RATE = 3e-3
MINI_BATCHES, UPDATE_EPOCHS = 2, 2

# What some need beside what their class declares. Pass@k learns from groups with a single best episode, of which there
# are few in groups of four once most episodes succeed. With the discount of 1 that GAE has by default, waiting costs
# nothing, since the values of the states after a time limit are bootstrapped.
GROUP_SIZES: dict[type[AdvantageEstimator], int] = {PassAtK: 2}
ARGUMENTS: dict[type[AdvantageEstimator], dict[str, Any]] = {GAE: {"gamma": 0.95, "lam": 0.95}}


@dataclass(frozen=True)
class Task:
    """An environment and how much of it makes an iteration. A perfect episode has a reward of 1.

    Args:
        name: for tables.
        env: id for gymnasium.
        words: of its observations and actions.
        episodes: of an iteration in groups.
        num_envs: without groups.
        turns_per_env: without groups.
        max_reply_tokens: of a reply.
    """

    name: str
    env: str
    words: tuple[str, ...]
    episodes: int
    num_envs: int
    turns_per_env: int
    max_reply_tokens: int = 1


BANDIT = Task(
    "contextual bandit",
    "agentrl_envs:Bandit-v0",
    ("sun", "rain", "snow", "hat", "umbrella", "gloves"),
    episodes=64,
    num_envs=32,
    turns_per_env=2,
)
TWO_ROOMS = Task(
    "two rooms",
    "benchmarks.estimators.two_rooms:TwoRooms-v0",
    ("west", "east", "north", "south", "wait"),
    episodes=32,
    num_envs=16,
    turns_per_env=12,
)


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Args:
        curve: mean reward of the episodes that ended in each iteration.
        learned: iterations until it reached the goal; None: it never did.
        seconds: of the fit.
    """

    curve: Sequence[float]
    learned: int | None
    seconds: float


def estimators() -> dict[str, type[AdvantageEstimator]]:
    """Every estimator of the package, by name."""
    found = map(advantages.__dict__.__getitem__, sorted(advantages.__all__))
    return {
        cls.__name__: cls
        for cls in found
        if inspect.isclass(cls) and issubclass(cls, AdvantageEstimator) and not inspect.isabstract(cls)
    }


def in_groups(estimator: AdvantageEstimator | type[AdvantageEstimator]) -> bool:
    """Whether it asks for whole episodes that are compared with others from their start."""
    return estimator.needs_groups or estimator.needs_greedy_baseline


class UntilLearned(RolloutCallback):
    """Notes the reward of each iteration and ends the run when it is good enough."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.curve: list[float] = []
        self.learned: int | None = None
        self._running: dict[tuple[int, int], float] = {}  # rewards of episodes that go on, by environment and number

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        ended = []
        for turn in rollout.turns:
            episode = turn.env, turn.episode
            self._running[episode] = self._running.get(episode, 0.0) + turn.reward
            if turn.done:
                ended.append(self._running.pop(episode))
        self.curve.append(sum(ended) / max(len(ended), 1))
        recent = self.curve[-RECENT:]
        if len(recent) == RECENT and sum(recent) / RECENT >= self.goal:
            self.learned = len(self.curve)
            trainer.should_stop = True


def make_agent(model: Path, estimator: AdvantageEstimator, critic: Critic | None = None) -> PPOAgent:
    """PPO's clipped loss without a KL. The critic is a separate one if none is given and values are needed."""
    return PPOAgent(
        str(model),
        critic=SeparateCritic() if critic is None and estimator.needs_values else critic,
        advantage=estimator,
        kl=KL(reward=0.0),
        entropy_bonus=0.01,
        optim=Optim(lr_actor=LEARNING_RATE, lr_critic=LEARNING_RATE),
    )


def make_data(
    task: Task, estimator: AdvantageEstimator, seed: int, update_epochs: int = UPDATE_EPOCHS
) -> RolloutDataModule:
    """Groups or a fixed number of turns, as the estimator declares. Replies that name no action pay nothing."""
    amount: dict[str, Any]
    if in_groups(estimator):
        size = GROUP_SIZES.get(type(estimator), 4)
        groups = GroupRollout(size, task.episodes // size, MINI_BATCHES)
        amount = {"groups": groups, "num_envs": task.episodes}
    else:
        turns = task.num_envs * task.turns_per_env // MINI_BATCHES
        amount = {"num_envs": task.num_envs, "turns_per_env": task.turns_per_env, "mini_batch_turns": turns}
    return RolloutDataModule(
        env=EnvConfig(task.env),
        memory=WindowMemory(0),
        prompt=PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=64),
        interaction=TurnInteraction(task.max_reply_tokens, invalid_penalty=0.0, invalid_mode="replace"),
        validation=ValidationConfig(episodes=0),
        update_epochs=update_epochs,
        seed=seed,
        **amount,
    )


def make_trainer(folder: Path, iterations: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """Quiet, on the CPU."""
    return L.Trainer(
        default_root_dir=folder,
        max_epochs=iterations,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )


def learn(task: Task, cls: type[AdvantageEstimator], folder: Path, seed: int, critic: Critic | None = None) -> Outcome:
    """Train a random model until it has learned a task.

    Args:
        task: what to learn.
        cls: estimator; it gets what it declares.
        folder: for the model and the run.
        seed: of the model, the episodes and the sampling.
        critic: in the place of a separate one.
    """
    estimator = cls(**ARGUMENTS.get(cls, {}))
    agent = make_agent(word_model(task.words, folder / "model", seed), estimator, critic)
    until = UntilLearned(GOAL)
    started = time.perf_counter()
    make_trainer(folder, ITERATIONS, [until]).fit(agent, make_data(task, estimator, seed))
    return Outcome(until.curve, until.learned, time.perf_counter() - started)
