"""The guessing game is the same over HTTP and in the trainer's process."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.advantages import GRPO, DualDiscountGAE
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.prompts.memory import FullMemory
from lightning_agentrl.rollout import AgentProgram, EnvConfig, GroupRollout, PromptFormat, RolloutDataModule
from lightning_agentrl.types import Rollout, Turn
from tests.agents.harness import KeepRollouts, make_agent, make_trainer
from tests.agents.test_agent_programs import make_data, program

GROUPS = {"groups": GroupRollout(size=2, per_rollout=16, mini_batches=2)}
MODES: dict[str, dict[str, Any]] = {
    "fixed turns with cuts": {"turns_per_env": 22, "mini_batch_turns": 44},  # 3 * 4 * 22 turns
    "groups": GROUPS,
    "ahead": {"turns_per_env": 22, "mini_batch_turns": 44, "max_staleness": 1},
}
TIMES = ("env_seconds", "engine_seconds")


def played(path: Path, folder: Path, env: AgentProgram | EnvConfig, mode: str) -> list[Rollout]:
    settings = MODES[mode] | {"memory": FullMemory(), "prompt": PromptFormat(max_prompt_tokens=1500)}
    data: RolloutDataModule = make_data(env, **settings)
    grouped, seen = "groups" in mode, KeepRollouts()
    torch.manual_seed(0)
    agent = make_agent(
        folder, SeparateCritic() if grouped else SharedCritic(), advantage=GRPO() if grouped else DualDiscountGAE()
    )
    make_trainer(path, 3, [seen]).fit(agent, data)
    return seen.rollouts


def facts(rollout: Rollout) -> tuple[list[dict[str, Any]], list[tuple[int, ...]]]:
    turns = [{f.name: getattr(turn, f.name) for f in fields(Turn) if f.name not in TIMES} for turn in rollout.turns]
    return turns, [sample.ids for sample in rollout.samples]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_every_field_of_every_turn_is_equal(tmp_path: Path, tiny_folder: Path, mode: str) -> None:
    workers: list[Any] = ["thread", "process"] if mode == "fixed turns with cuts" else ["thread"]
    http = played(tmp_path / "http", tiny_folder, program(tmp_path, "mixed"), mode)
    print(mode, sum(len(rollout.turns) for rollout in http), "turns")
    for worker in workers:
        own = EnvConfig("tests.gateway.in_process:GuessInProcess-v0", worker=worker)
        for one, other in zip(http, played(tmp_path / worker, tiny_folder, own, mode), strict=True):
            assert facts(one) == facts(other)
            for name in ("rollout_logps", "rewards", "advantages", "returns"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
