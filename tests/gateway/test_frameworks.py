"""Agents of four frameworks, unmodified but for environment variables: one training iteration each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_agentrl.rollout import AgentProgram, RolloutDataModule, TurnInteraction, ValidationConfig
from tests.agents.harness import KeepRollouts, make_agent, make_trainer
from tests.published import published_tokenizer
from tests.tiny import tiny_model_folder

PYTHON = Path(__file__).parents[2] / "build" / "agents" / "bin" / "python"  # made by `make agents`
AGENTS = Path(__file__).with_name("agents")


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make agents`")
@pytest.mark.parametrize("name", ["openai_agents", "smol", "typed_output", "anthropic_loop"])
def test_an_agent_of_a_framework_trains(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    (tmp_path / "tasks.jsonl").write_text('{"hint": "none"}\n')
    tokenizer = published_tokenizer("qwen2_5")
    tokenizer.model_max_length = 16384  # frameworks write long prompts
    folder = tiny_model_folder(tmp_path / "model", "qwen2", tokenizer=tokenizer, max_position_embeddings=16384)
    program = AgentProgram(
        [str(PYTHON), str(AGENTS / f"{name}.py")],
        str(tmp_path / "tasks.jsonl"),
        environment=["OPENAI_AGENTS_DISABLE_TRACING"],
    )
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
    assert len(rollout.turns) == 6
    assert all(turn.call and "tools/parsed" in turn.metrics for turn in rollout.turns)
