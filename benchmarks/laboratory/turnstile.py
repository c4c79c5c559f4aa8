"""A run whose iterations are let in one by one, with whatever version of this repository is found first.

Started by `turns_per_second.py` with the words of a reply, whether the critic is shared, the model and the number of
iterations; uses what older versions have, too.
"""

from __future__ import annotations

import inspect
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.agent import Agent
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.rollout import (
    ActionParser,
    EnvConfig,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)

TURNS = 512  # of an iteration, in two optimizer steps, as in the laboratory
ENVS = 64
LR = 5e-4


class Turnstile(L.Callback):
    """Waits before each iteration for a line on standard input, and answers with what the iteration took."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not sys.stdin.readline():
            raise SystemExit("nobody asks for more iterations")
        self.began = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        clock, processor = self.began
        print("took", time.perf_counter() - clock, time.process_time() - processor, flush=True)


def last_word() -> ActionParser:
    """Return a parser that takes the last word as the action; what it returns is named in the module of its base."""
    parsed = sys.modules[ActionParser.__module__].ParsedReply  # type: ignore[attr-defined]

    class LastWord(ActionParser):
        def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> Any:
            thought, _, word = reply.strip().rpartition(" ")
            return parsed(thought, word if word in actions else None, len(thought) + 1 if thought else 0)

    return LastWord()


def agent_of(model: str, shared: bool) -> PPOAgent:
    """Return an agent without a reference policy; its arguments were flat once."""
    settings: dict[str, Any] = {"lr_actor": LR, "lr_critic": LR}
    if "optim" in inspect.signature(Agent.__init__).parameters:
        from lightning_agentrl.agents import KL, Optim

        settings = {"optim": Optim(**settings), "kl": KL(reward=0.0)}
    else:
        settings["kl_in_reward"] = 0.0
    return PPOAgent(model, critic=SharedCritic() if shared else SeparateCritic(), entropy_bonus=0.0, **settings)


def data_of(words: int) -> RolloutDataModule:
    """Return key and door, as the cells of the laboratory play it."""
    sys.path.append(str(Path(__file__).parent))  # the game alone, behind all packages
    settings: dict[str, Any] = {"prove": "off"}
    return RolloutDataModule(
        env=EnvConfig("key_door:KeyDoor-v0", {"horizon": 12}),
        num_envs=ENVS,
        turns_per_env=TURNS // ENVS,
        mini_batch_turns=TURNS // 2,
        memory=WindowMemory(turns=0),
        prompt=PromptFormat(instruction="", system="", examples=False, max_prompt_tokens=96),
        interaction=TurnInteraction(words, last_word(), invalid_penalty=0.0),
        engine=TransformersEngine(max_batch=ENVS),
        validation=ValidationConfig(episodes=0, num_envs=1),
        **{key: x for key, x in settings.items() if key in inspect.signature(RolloutDataModule.__init__).parameters},
    )


def train(words: int, shared: bool, model: str, iterations: int) -> None:
    """Train, an iteration for each line on standard input."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=iterations,
            callbacks=[Turnstile()],
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        trainer.fit(agent_of(model, shared), data_of(words))


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3], int(sys.argv[4]))
