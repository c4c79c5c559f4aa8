"""Agents of four frameworks, unmodified but for environment variables, and a task set of `verifiers`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from lightning_agentrl.rollout import AgentProgram, RolloutDataModule, TurnInteraction, ValidationConfig
from lightning_agentrl.types import Turn
from tests.agents.harness import KeepRollouts, make_agent, make_trainer
from tests.published import published_tokenizer
from tests.tiny import tiny_model_folder

PYTHON = Path(__file__).parents[2] / "build" / "agents" / "bin" / "python"  # made by `make agents`
AGENTS = Path(__file__).with_name("agents")
VERIFIERS = Path(__file__).parents[2] / "build" / "verifiers" / "bin"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "agent"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make agents`")
@pytest.mark.parametrize("name", ["openai_agents", "smol", "typed_output", "anthropic_loop"])
def test_an_agent_of_a_framework_trains(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    (tmp_path / "tasks.jsonl").write_text('{"hint": "none"}\n')
    program = AgentProgram(
        [str(PYTHON), str(AGENTS / f"{name}.py")],
        str(tmp_path / "tasks.jsonl"),
        environment=["OPENAI_AGENTS_DISABLE_TRACING"],
    )
    turns = train(tmp_path, program)
    assert len(turns) == 6
    assert all(turn.call and "tools/parsed" in turn.metrics for turn in turns)


@pytest.mark.long
@pytest.mark.skipif(not VERIFIERS.exists(), reason="needs `make agents`")
def test_a_task_set_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{VERIFIERS}:{os.environ['PATH']}")  # `uv` prepares the program that calls the model
    monkeypatch.setenv("PYTHONPATH", str(AGENTS))
    task = {"env": {"taskset": {"id": "long_words"}}, "max_tokens": 8}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**task, "index": i}) + "\n" for i in range(8)))
    command = [str(VERIFIERS / "python"), str(GUIDE / "verifiers_agent.py")]
    passed_on = [name for name in os.environ if name.startswith(("UV_", "SSL_"))]  # how `uv` reaches its index
    program = AgentProgram(
        command,
        str(tmp_path / "tasks.jsonl"),
        preload=["verifiers.v1"],
        seconds_between_calls=300,
        environment=passed_on,
    )
    turns = train(tmp_path, program)
    assert len(turns) == 6
    assert [turn.reward for turn in turns] == [len(turn.reply.strip()) for turn in turns]
    assert len({turn.reward for turn in turns}) > 1


def train(tmp_path: Path, program: AgentProgram) -> list[Turn]:
    """Train a tiny model behind a program for one iteration of two environments, three turns each."""
    tokenizer = published_tokenizer("qwen2_5")
    tokenizer.model_max_length = 16384  # frameworks write long prompts
    folder = tiny_model_folder(tmp_path / "model", "qwen2", tokenizer=tokenizer, max_position_embeddings=16384)
    data = RolloutDataModule(
        program,
        num_envs=2,
        turns_per_env=3,
        mini_batch_turns=6,
        interaction=TurnInteraction(max_reply_tokens=8),
        validation=ValidationConfig(episodes=1, num_envs=1),
        seed=1,
    )
    seen = KeepRollouts()
    torch.manual_seed(0)
    make_trainer(tmp_path, 1, [seen]).fit(make_agent(folder), data)
    (rollout,) = seen.rollouts
    return rollout.turns
