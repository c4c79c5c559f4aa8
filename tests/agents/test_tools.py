"""Training a policy that calls tools of an environment."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from lightning_agentrl.engines import Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.rollout import EnvConfig, PromptFormat, RolloutDataModule, TurnInteraction, ValidationConfig
from tests.agents.harness import KeepRollouts, make_agent, make_trainer
from tests.published import published_tokenizer
from tests.tiny import tiny_model_folder

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'


class Caller(TransformersEngine):
    """Replies with a call of the tool, whatever the policy would sample."""

    ids: tuple[int, ...] = ()

    async def generate(self, request: SamplingRequest) -> Reply:
        return Reply(self.ids, (-1.0,) * len(self.ids), True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [False, True])
def test_an_iteration_in_which_no_call_can_be_read_is_told(tmp_path: Path, calls: bool) -> None:
    tokenizer = published_tokenizer("qwen2_5")
    folder = tiny_model_folder(tmp_path / "model", "qwen2", tokenizer=tokenizer, max_position_embeddings=2048)
    engine = TransformersEngine()
    if calls:
        engine = Caller()
        engine.ids = (*tokenizer.encode(CALL, add_special_tokens=False), tokenizer.eos_token_id)
    data = RolloutDataModule(
        EnvConfig("agentrl_envs:Calculator-v0", {"examples": 0}),
        engine=engine,
        num_envs=2,
        turns_per_env=2,
        mini_batch_turns=4,
        prompt=PromptFormat(think=False, instruction="", max_prompt_tokens=1500),
        interaction=TurnInteraction(max_reply_tokens=40),
        validation=ValidationConfig(episodes=1, num_envs=1),
        seed=1,
    )
    seen = KeepRollouts()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_trainer(tmp_path, 1, [seen]).fit(make_agent(folder), data)
    (rollout,) = seen.rollouts
    assert sum(turn.metrics["tools/parsed"] for turn in rollout.turns) == (4 if calls else 0)
    assert any("no reply of an iteration contained a readable" in str(warning.message) for warning in told) is not calls
