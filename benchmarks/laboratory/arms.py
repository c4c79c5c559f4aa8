"""One run of one arm: the package's own agent and rollouts, read out exactly after every iteration."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.laboratory.cloning import PROMPT, Beginning, Solved
from benchmarks.laboratory.exact import Array
from benchmarks.laboratory.fits import data_of, quiet_trainer
from benchmarks.laboratory.memories import MemoryKind, memory_of
from benchmarks.laboratory.policy import LastWord, Reader
from lightning_agentrl.advantages import AdvantageEstimator, DualDiscountGAE
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.losses import NoCorrection, OffPolicyCorrection, TruncatedWeights
from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.rollout import (
    GroupRollout,
    Prepared,
    RolloutDataModule,
    RolloutSource,
    RolloutStream,
    TurnInteraction,
    ValidationConfig,
)
from lightning_agentrl.types import Rollout

TURNS = 512  # of an iteration
STEPS = 2  # of an iteration
WARMUP_ROUNDS = 10


@dataclass(frozen=True)
class Arm:
    """One setting; all that is not named is equal in every arm.

    Args:
        estimator: of advantages.
        arguments: of the estimator.
        turns_per_env: turns of each environment in an iteration, which has 512 turns in all.
        group: episodes of a group, where whole groups are played; None: a fixed number of turns.
        episodes: of an iteration of groups.
        random_head: the value head begins with values of standard deviation 1 over the states, in place of 0.
        warmup: rounds in which the critic learns alone before the actor moves.
        lr: learning rate of actor and critic.
        max_staleness: iterations by which rollouts are collected ahead.
        corrected: whether stale rollouts are reweighted.
        waits: iterations that each rollout waits before it is trained on.
        history: past turns that a prompt shows.
        thoughts: of them that keep their thought, the newest ones.
        memory_kind: what of the past is shown, if not a window; see :func:`memory_of`, whose ``turns`` are ``history``.
    """

    estimator: type[AdvantageEstimator] = DualDiscountGAE
    arguments: Mapping[str, Any] = field(default_factory=dict)
    turns_per_env: int = 8
    group: int | None = None
    episodes: int = 32
    random_head: bool = False
    warmup: int = 0
    lr: float = 5e-4
    max_staleness: int = 0
    corrected: bool = True
    waits: int = 0
    history: int = 0
    thoughts: int = 0
    memory_kind: MemoryKind = "window"

    @property
    def envs(self) -> int:
        """Environments that play at a time."""
        return TURNS // self.turns_per_env if self.group is None else self.episodes

    @property
    def memory(self) -> Memory:
        return memory_of(self.memory_kind, self.history, self.thoughts)


class GivenHead(SeparateCritic):
    """A critic whose value head begins with given weights.

    Args:
        weight: [hidden size].
        bias: a number.
    """

    def __init__(self, weight: list[float], bias: float) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def build(self, actor_hidden_size: int, load: Callable[[str | None], PreTrainedModel]) -> None:
        super().build(actor_hidden_size, load)
        with torch.no_grad():
            self.head.linear.weight.copy_(torch.tensor([self.weight]))
            self.head.linear.bias.fill_(self.bias)


def random_head(reader: Reader, seed: int) -> GivenHead:
    """Return a critic whose values have mean 0 and standard deviation 1 over the states of the game."""
    hidden_SH = reader.hidden()
    weight_H = torch.randn(hidden_SH.shape[1], generator=torch.Generator().manual_seed(seed))
    values_S = hidden_SH @ weight_H
    scale = float(values_S.std())
    return GivenHead((weight_H / scale).tolist(), -float(values_S.mean()) / scale)


class ExactCurve(RolloutCallback):
    """Notes after each iteration in which the actor moved how good the policy is, and the turns played until then.

    Args:
        reader: of the policy.
        success: of a table of action probabilities.
    """

    def __init__(self, reader: Reader, success: Callable[[Array], float]) -> None:
        self.reader = reader
        self.success = success
        self.curve: list[float] = [success(reader.table())]
        self.turns = [0]
        self._played = 0

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if agent.phase == "train":
            self._played += len(rollout.turns)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.phase != "train":
            return
        weights = {name: x.detach() for name, x in pl_module.actor.lm.state_dict().items()}
        self.curve.append(self.success(self.reader.table(weights)))
        self.turns.append(self._played)


class Waiting(L.Callback, RolloutSource):
    """Rollouts that are trained on so many iterations after they were collected.

    Args:
        iterations: that each of them waits.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._queue: deque[Rollout] = deque()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cast(Any, trainer).datamodule.stream.source = self

    def next_rollout(self, stream: RolloutStream) -> Prepared:
        while len(self._queue) <= self.iterations:
            self._queue.append(stream.collect())
        return stream.prepare(self._queue.popleft())


def rollouts(start: Beginning, arm: Arm, seed: int) -> RolloutDataModule:
    """Return what an arm plays: equal seeds play equal levels with equal noise.

    Args:
        start: the game.
        arm: what is compared.
        seed: of levels and noise.
    """
    amount: dict[str, Any]
    if arm.group is None:
        amount = {"turns_per_env": arm.turns_per_env, "mini_batch_turns": TURNS // STEPS}
    else:
        amount = {"groups": GroupRollout(arm.group, arm.episodes // arm.group, STEPS)}
    interaction = TurnInteraction(start.reply_tokens, LastWord(), invalid_penalty=0.0)
    return data_of(
        start.env,
        PROMPT,
        interaction,
        seed,
        num_envs=arm.envs,
        memory=arm.memory,
        engine=TransformersEngine(max_batch=arm.envs),
        validation=ValidationConfig(episodes=0, num_envs=1),
        max_staleness=arm.max_staleness,
        **amount,
    )


def correction_of(arm: Arm) -> OffPolicyCorrection | None:
    """Return what is done about stale rollouts; None: what the agent does by itself."""
    if not arm.corrected:
        return NoCorrection()
    return TruncatedWeights() if arm.waits else None


def agent_of(model: Path, arm: Arm, critic: Critic | None) -> PPOAgent:
    """Return the agent of an arm."""
    return PPOAgent(
        str(model),
        critic=critic,
        advantage=arm.estimator(**arm.arguments),
        correction=correction_of(arm),
        kl=KL(reward=0.0),
        entropy_bonus=0.0,
        optim=Optim(lr_actor=arm.lr, lr_critic=arm.lr),
    )


def warmup_of(arm: Arm) -> list[L.Callback]:
    """Return the warm-up of an arm, if it has one: two iterations of turns, an epoch for each round."""
    if not arm.warmup:
        return []
    return [CriticWarmup(rollouts=2, rounds=arm.warmup, fraction=0.5, min_explained_variance=None)]


def warmup_turns(arm: Arm) -> int:
    """Return the turns that are played before the actor moves."""
    return 2 * TURNS if arm.warmup else 0


def play(start: Solved, model: Path, arm: Arm, iterations: int, seed: int) -> dict[str, Any]:
    """Train one arm from a cloned model.

    Args:
        start: the game.
        model: folder of the policy to start from.
        arm: what is compared.
        iterations: in which the actor moves.
        seed: of levels, noise and the value head.

    Returns:
        ``curve``: exact success before and after each iteration; ``turns`` played until then, those of a warm-up
        included; and ``seconds``.
    """
    reader = start.reader(model, arm.memory)
    critic: Critic | None = None
    if arm.estimator.needs_values:
        critic = random_head(reader, seed) if arm.random_head else SeparateCritic()
    agent = agent_of(model, arm, critic)
    curve = ExactCurve(reader, start.success)
    callbacks: list[L.Callback] = [curve, *warmup_of(arm), *[Waiting(arm.waits)] * (arm.waits > 0)]
    L.seed_everything(seed, verbose=False)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(Path(folder), iterations + arm.warmup, callbacks)
        trainer.fit(agent, rollouts(start, arm, seed))
    seconds = time.perf_counter() - started
    return {
        "curve": np.round(curve.curve, 5).tolist(),
        "turns": [0, *(warmup_turns(arm) + played for played in curve.turns[1:])],
        "seconds": round(seconds, 2),
    }
