"""The guessing game is the same over HTTP and in the trainer's process."""

from __future__ import annotations

import os
import pickle
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
from tests.agents.processes import next_port
from tests.agents.test_agent_programs import make_data, program
from tests.started import outcomes

GROUPS = {"groups": GroupRollout(size=2, per_rollout=16, mini_batches=2)}
MODES: dict[str, dict[str, Any]] = {
    "fixed turns with cuts": {"turns_per_env": 22, "mini_batch_turns": 44},  # 3 * 4 * 22 turns
    "groups": GROUPS,
    "ahead": {"turns_per_env": 22, "mini_batch_turns": 44, "max_staleness": 1},
}
TIMES = ("env_seconds", "engine_seconds")


def played(path: Path, folder: Path, env: AgentProgram | EnvConfig, mode: str, **trainer: Any) -> list[Rollout]:
    settings = MODES[mode] | {"memory": FullMemory(), "prompt": PromptFormat(max_prompt_tokens=1500)}
    data: RolloutDataModule = make_data(env, **settings)
    grouped, seen = "groups" in mode, KeepRollouts()
    torch.manual_seed(0)
    agent = make_agent(
        folder, SeparateCritic() if grouped else SharedCritic(), advantage=GRPO() if grouped else DualDiscountGAE()
    )
    make_trainer(path, 3, [seen], **trainer).fit(agent, data)
    return seen.rollouts


def facts(rollout: Rollout) -> dict[str, Any]:
    numbers = ("rollout_logps", "rewards", "advantages", "returns")
    return {
        "turns": [
            {f.name: getattr(turn, f.name) for f in fields(Turn) if f.name not in TIMES} for turn in rollout.turns
        ],
        "ids": [sample.ids for sample in rollout.samples],
        **{name: getattr(rollout, name).tolist() for name in numbers},
    }


def in_process(worker: Any) -> EnvConfig:
    return EnvConfig("tests.gateway.in_process:GuessInProcess-v0", worker=worker)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_every_field_of_every_turn_is_equal(tmp_path: Path, tiny_folder: Path, mode: str) -> None:
    workers: list[Any] = ["thread", "process"] if mode == "fixed turns with cuts" else ["thread"]
    http = played(tmp_path / "http", tiny_folder, program(tmp_path, "mixed"), mode)
    print(mode, sum(len(rollout.turns) for rollout in http), "turns")
    for worker in workers:
        own = played(tmp_path / worker, tiny_folder, in_process(worker), mode)
        assert [*map(facts, http)] == [*map(facts, own)]


def play_as_rank(rank: int, port: int, path: Path, folder: Path, env: AgentProgram | EnvConfig) -> None:
    """Work of one of two processes: play and train, then keep what was seen."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": str(port)}
    seen = played(path, folder, env, "fixed turns with cuts", devices=2, strategy="ddp")
    (path / f"{rank}.pickle").write_bytes(pickle.dumps([*map(facts, seen)]))


@pytest.mark.long
def test_every_field_is_equal_on_two_ranks(tmp_path: Path, tiny_folder: Path) -> None:
    seen = {}
    for name, env in {"http": program(tmp_path, "mixed"), "own": in_process("thread")}.items():
        path = tmp_path / name
        path.mkdir()
        for code, said in outcomes(2, play_as_rank, next_port(), path, tiny_folder, env, folder=path):
            assert code == 0, said[-3000:]
        seen[name] = [pickle.loads((path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    print(sum(len(rollout["turns"]) for rank in seen["http"] for rollout in rank), "turns")
    assert seen["http"] == seen["own"]
    assert seen["http"][0] != seen["http"][1]  # each rank has environments of its own
