"""Short real fits: a tiny model, a real game, the real engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.agents import KL, Compute, Optim, PPOAgent, RolloutCallback
from lightning_agentrl.callbacks import EngineCheck
from lightning_agentrl.models.critic import Critic, SharedCritic
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply
from lightning_agentrl.rollout import (
    EnvConfig,
    Prepared,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types import Rollout


class ByLength(ActionParser):
    """Finds an action in whatever a random model writes."""

    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        return ParsedReply("", list(actions)[len(reply) % len(actions)])


class Misread(PPOAgent):
    """Takes the engine's log-probs for others than they are."""

    def prepare(self, rollout: Rollout) -> Prepared:
        noise = 0.8 * torch.sin(7.0 * torch.arange(rollout.rollout_logps.numel())).view_as(rollout.rollout_logps)
        return super().prepare(rollout.union(rollout_logps=rollout.rollout_logps + noise))


class Keeping(PPOAgent):
    """Keeps its rollouts once they are scored."""

    rollouts: list[Rollout]

    def shape_rewards(self, rollout: Rollout) -> torch.Tensor:
        self.rollouts = [*getattr(self, "rollouts", []), rollout]
        return super().shape_rewards(rollout)


class KeepRollouts(RolloutCallback):
    """Keeps what callbacks are shown of the rollouts of a run."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.rollouts.append(rollout)


def make_agent(folder: Path, critic: Critic | None = None, **kwargs: Any) -> PPOAgent:
    """Learning rates large enough that a step shows."""
    defaults = {"kl_reward": 0.01, "lr_actor": 1e-3, "lr_critic": 1e-2, "advantage": DualDiscountGAE()}
    return PPOAgent(str(folder), critic=critic or SharedCritic(), **grouped({**defaults, **kwargs}))


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an agent, of which those of ``optim``, ``compute`` and ``kl`` (as ``kl_...``) may stand alone."""
    arguments = dict(settings)
    for name, prefix, kind in (("optim", "", Optim), ("compute", "", Compute), ("kl", "kl_", KL)):
        own = {f.name: arguments.pop(prefix + f.name) for f in fields(kind) if prefix + f.name in arguments}
        if own:
            arguments[name] = kind(**own)
    return arguments


def make_data(**kwargs: Any) -> RolloutDataModule:
    """GuessNumber: several turns, episodes that end inside rollouts; whole episodes with ``groups``."""
    sizes = {} if kwargs.get("groups") else {"turns_per_env": 4, "mini_batch_turns": 8}
    defaults: dict[str, Any] = {
        "env": EnvConfig("agentrl_envs:GuessNumber-v0"),
        "num_envs": 4,
        **sizes,
        "memory": WindowMemory(1),
        "prompt": PromptFormat(think=False, max_prompt_tokens=512),
        "interaction": TurnInteraction(max_reply_tokens=4),
        "validation": ValidationConfig(episodes=8, num_envs=4, every=1),
        "seed": 3,
    }
    return RolloutDataModule(**{**defaults, **kwargs})


def make_trainer(path: Path, epochs: int, callbacks: list[L.Callback] | None = None, **kwargs: Any) -> L.Trainer:
    """Float64 on the CPU, quiet.

    The engine is not compared by default, which changes nothing and takes half of such a short run.
    """
    callbacks = list(callbacks or [])
    if not any(isinstance(callback, EngineCheck) for callback in callbacks):
        callbacks.append(EngineCheck("off"))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return L.Trainer(default_root_dir=path, max_epochs=epochs, callbacks=callbacks, **{**defaults, **kwargs})
