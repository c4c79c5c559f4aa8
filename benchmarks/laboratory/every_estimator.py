"""Every estimator trains a random model on small tasks until they are learned: one recipe, three seeds.

`make laboratory` makes the runs that are missing, and `docs/results/laboratory.md` tells of them.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

import lightning_agentrl.advantages as advantages
from benchmarks.laboratory.fits import data_of, quiet_trainer
from benchmarks.laboratory.records import Records, load, save
from lightning_agentrl.advantages import GAE, AdvantageEstimator, PassAtK
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.models.words import word_model
from lightning_agentrl.rollout import EnvConfig, GroupRollout, PromptFormat, RolloutDataModule, TurnInteraction
from lightning_agentrl.types import Rollout

RECORD = Path(__file__).parents[2] / "docs" / "results" / "every_estimator.json"
SEEDS = (0, 1, 2)
ITERATIONS = 150  # at most
RECENT = 5  # iterations whose mean reward has to reach the goal
GOAL = 0.9  # of the reward of a perfect policy, which is 1 in all tasks here
LEARNING_RATE = 3e-3
MINI_BATCHES, UPDATE_EPOCHS = 2, 2
PROMPT = PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=64)

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
        words: of its observations and actions; a reply is one of them.
        episodes: of an iteration in groups.
        num_envs: without groups.
        turns_per_env: without groups.
    """

    name: str
    env: str
    words: tuple[str, ...]
    episodes: int
    num_envs: int
    turns_per_env: int


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
    "benchmarks.laboratory.two_rooms:TwoRooms-v0",
    ("west", "east", "north", "south", "wait"),
    episodes=32,
    num_envs=16,
    turns_per_env=12,
)
IN_ROOMS = ("GAE", "DualDiscountGAE", "GRPO", "OptimalTokenBaseline")


def estimators() -> dict[str, type[AdvantageEstimator]]:
    """Return every estimator of the package by name."""
    found = map(advantages.__dict__.__getitem__, sorted(advantages.__all__))
    return {
        cls.__name__: cls
        for cls in found
        if inspect.isclass(cls) and issubclass(cls, AdvantageEstimator) and not inspect.isabstract(cls)
    }


def in_groups(estimator: AdvantageEstimator | type[AdvantageEstimator]) -> bool:
    """Return whether it asks for whole episodes that are compared with others from their start."""
    return estimator.needs_groups or estimator.needs_greedy_baseline


class UntilLearned(RolloutCallback):
    """Notes the reward of each iteration and ends the run when it is good enough."""

    def __init__(self) -> None:
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
        if len(recent) == RECENT and sum(recent) / RECENT >= GOAL:
            self.learned = len(self.curve)
            trainer.should_stop = True


def played(task: Task, estimator: AdvantageEstimator, seed: int) -> RolloutDataModule:
    """Return groups or a fixed number of turns, as the estimator declares. Words that are no action pay nothing."""
    amount: dict[str, Any]
    if in_groups(estimator):
        size = GROUP_SIZES.get(type(estimator), 4)
        groups = GroupRollout(size, task.episodes // size, MINI_BATCHES)
        amount = {"groups": groups, "num_envs": task.episodes}
    else:
        turns = task.num_envs * task.turns_per_env // MINI_BATCHES
        amount = {"num_envs": task.num_envs, "turns_per_env": task.turns_per_env, "mini_batch_turns": turns}
    interaction = TurnInteraction(1, invalid_penalty=0.0, invalid_mode="replace")
    return data_of(EnvConfig(task.env), PROMPT, interaction, seed, update_epochs=UPDATE_EPOCHS, **amount)


def learn(
    task: Task, cls: type[AdvantageEstimator], folder: Path, seed: int, critic: Critic | None = None
) -> dict[str, Any]:
    """Train a random model with PPO's clipped loss and no KL until it has learned a task.

    Args:
        task: what to learn.
        cls: estimator; it gets what it declares.
        folder: for the model and the run.
        seed: of the model, the episodes and the sampling.
        critic: in the place of a separate one.

    Returns:
        ``curve``: mean reward of the episodes that ended in each iteration; ``learned``: iterations until it reached
        the goal, None if it never did; ``seconds`` of the fit.
    """
    estimator = cls(**ARGUMENTS.get(cls, {}))
    agent = PPOAgent(
        str(word_model(task.words, folder / "model", seed)),
        critic=SeparateCritic() if critic is None and estimator.needs_values else critic,
        advantage=estimator,
        kl=KL(reward=0.0),
        entropy_bonus=0.01,
        optim=Optim(lr_actor=LEARNING_RATE, lr_critic=LEARNING_RATE),
    )
    until = UntilLearned()
    started = time.perf_counter()
    quiet_trainer(folder, ITERATIONS, [until]).fit(agent, played(task, estimator, seed))
    seconds = round(time.perf_counter() - started, 2)
    return {"curve": [round(x, 3) for x in until.curve], "learned": until.learned, "seconds": seconds}


def key(name: str, task: Task, seed: int) -> str:
    return f"{name}-{task.name.replace(' ', '_')}-{seed}"


def planned() -> dict[str, tuple[str, Task, int]]:
    """Return estimator, task and seed of every run by its key: all of them learn the bandit, some the rooms."""
    every = [(name, task) for task, names in ((BANDIT, estimators()), (TWO_ROOMS, IN_ROOMS)) for name in names]
    return {key(name, task, seed): (name, task, seed) for name, task in every for seed in SEEDS}


def kept(folder: Path) -> Records:
    """Return the runs of the record and of a folder."""
    return load(folder, RECORD, planned().keys())


def run(folder: Path, part: int, parts: int) -> None:
    """Make the runs of a share that neither the record nor the folder has."""
    made = kept(folder)
    for place, (name, task, seed) in list(planned().items())[part - 1 :: parts]:
        path = folder / f"{place}.json"
        if place in made or path.exists():
            continue
        with tempfile.TemporaryDirectory() as draft:
            done = learn(task, estimators()[name], Path(draft), seed)
        save(path, json.dumps(done))
        told = f"after {done['learned']} iterations" if done["learned"] else "not learned"
        print(f"{name}, {task.name}, seed {seed}: {told}, {done['seconds']:.0f} s", flush=True)
