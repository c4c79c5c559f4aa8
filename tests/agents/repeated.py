"""Short runs whose environments take as long as chance will have it, and all that they computed as one text.

python -m tests.agents.repeated FOLDER_OF_A_TINY_MODEL
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import torch

from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.callbacks import EngineCheck
from lightning_agentrl.rollout import EnvConfig, GroupRollout, RawParser, TurnInteraction, ValidationConfig
from lightning_agentrl.types import Rollout
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.rollout.scripted import FREE_TEXT, Varied, story

CHANCE = random.SystemRandom()  # no seed reaches it
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # of the data, of the agent, and the precision
    "plain": ({}, {}, "32-true"),
    "groups": (
        {"groups": GroupRollout(3, 4, mini_batches=2, ahead=2)},
        {"critic": None, "advantage": GRPO()},
        "32-true",
    ),
    "asynchronous": ({"max_staleness": 1}, {}, "bf16-mixed"),  # autocast keeps weights that it cast for all threads
}


class Restless(Varied):
    """Takes up to 20 ms for each step, and now and then longer."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(CHANCE.random() * (0.1 if CHANCE.random() < 0.1 else 0.02))
        return super().step(action)


gymnasium.register("Restless-v0", Restless)


class Everything(RolloutCallback):
    """What was sampled and what was logged, except for times."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_rollout(self, trainer: Any, agent: Any, rollout: Rollout) -> None:
        assert rollout.rollout_logps is not None
        self.seen.append(
            [repr(turn) for turn in story(rollout)]
            + [x.hex() for x in rollout.rollout_logps[rollout.action_mask.bool()].tolist()]
        )

    def on_train_epoch_end(self, trainer: Any, agent: Any) -> None:
        logged = {name: float(value).hex() for name, value in trainer.callback_metrics.items()}
        self.seen.append({name: logged[name] for name in sorted(logged) if not name.startswith("time/")})


def run(kind: str, folder: Path) -> dict[str, str]:
    """Train for three iterations; return a hash of each thing that has to be equal."""
    of_data, of_agent, precision = KINDS[kind]
    torch.manual_seed(0)
    agent = make_agent(folder, **of_agent)
    data = make_data(
        env=EnvConfig("Restless-v0"),
        prompt=FREE_TEXT,
        interaction=TurnInteraction(12, RawParser()),
        validation=ValidationConfig(episodes=5, num_envs=3, every=1),
        **of_data,
    )
    everything = Everything()
    with tempfile.TemporaryDirectory() as path:
        trainer = make_trainer(Path(path), 3, [everything, EngineCheck()], precision=precision, limit_val_batches=1)
        trainer.fit(agent, data)
        optimizer = agent.optimizers(use_pl_optimizer=False)
    tensors = {"weights": agent.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return {
        "what happened": hashlib.sha256(json.dumps(everything.seen).encode()).hexdigest(),
        **{name: digest(state) for name, state in tensors.items()},
    }


def digest(state: Any) -> str:
    """Hash all tensors of nested mappings."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in value:
                found.update(str(name).encode())
                add(value[name])

    add(state)
    return found.hexdigest()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy with loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    print(json.dumps({kind: run(kind, Path(sys.argv[1])) for kind in KINDS}))
