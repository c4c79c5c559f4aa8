"""Seconds of an iteration, synchronous and with the next rollout collected while the current one trains, in one run.

Environments take 50 ms a step and do not compute meanwhile. The two kinds of run take turns, so that whatever else the
machine does meets both; the first two iterations of each run are left out (nothing is ahead yet, and things get warm).

    python -m benchmarks.engines.asynchronous --envs 8 --turns 8 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings

import gymnasium
import lightning as L

from benchmarks.engines.setting import MODEL, PROMPT, Delay
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.engines import TransformersEngine, VLLMEngine
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.rollout import EnvConfig, RawParser, RolloutDataModule, TurnInteraction, WindowMemory

SECONDS = 0.05
ENGINES = {"vllm": VLLMEngine, "transformers": TransformersEngine}

gymnasium.register("Delay-v0", lambda: Delay(0, lambda _: SECONDS))


class Seconds(L.Callback):
    """Of each iteration."""

    def __init__(self) -> None:
        self.iterations: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.iterations.append(time.perf_counter() - self._started)


def measure(max_staleness: int, args: argparse.Namespace) -> list[float]:
    """Seconds of the iterations of one run."""
    agent = PPOAgent(args.model, SharedCritic(), kl=KL(reward=0.0), optim=Optim(lr_actor=1e-6))
    turns = args.envs * args.turns
    data = RolloutDataModule(
        EnvConfig("Delay-v0"),
        num_envs=args.envs,
        turns_per_env=args.turns,
        mini_batch_turns=turns // 2,
        memory=WindowMemory(0),
        prompt=PROMPT,
        interaction=TurnInteraction(args.reply, RawParser()),
        engine=ENGINES[args.engine](max_batch=args.envs),
        max_staleness=max_staleness,
        seed=0,
    )
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=args.iterations + 2,
            callbacks=[seconds],
            limit_val_batches=0,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **quiet,
        )
        trainer.fit(agent, data)
    return seconds.iterations[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="transformers")
    parser.add_argument("--model", default=MODEL, help="hub id, folder or demo")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--reply", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(args.repeats):
        for max_staleness in (0, 1) if repeat % 2 == 0 else (1, 0):
            seconds[max_staleness] += measure(max_staleness, args)
    medians = {name: statistics.median(seconds[bound]) for name, bound in (("synchronous", 0), ("asynchronous", 1))}
    setting = {name: getattr(args, name) for name in ("engine", "model", "envs", "turns", "reply")}
    ratio = medians["synchronous"] / medians["asynchronous"]
    print(json.dumps({**setting, **medians, "ratio": ratio, "iterations": len(seconds[0])}), flush=True)


if __name__ == "__main__":
    main()
