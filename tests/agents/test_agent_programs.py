"""Training the policy of agent programs that run unmodified."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.engines import Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import AgentProgram, RolloutDataModule, TurnInteraction, ValidationConfig
from lightning_agentrl.types import Rollout
from tests.agents.harness import KeepRollouts, make_agent, make_trainer

SCRIPT = Path(__file__).parents[1] / "gateway" / "agents" / "guess.py"


def program(tmp_path: Path, *arguments: str, **settings: Any) -> AgentProgram:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"hint": "It is odd."}\n{"hint": "It is even."}\n')
    settings = {"preload": ["urllib.request", "random"], **settings}
    return AgentProgram([sys.executable, str(SCRIPT), *arguments], str(tasks), **settings)


def make_data(env: AgentProgram, **settings: Any) -> RolloutDataModule:
    defaults: dict[str, Any] = {
        "num_envs": 4,
        "turns_per_env": 6,
        "mini_batch_turns": 12,
        "interaction": TurnInteraction(max_reply_tokens=5),
        "validation": ValidationConfig(episodes=2, num_envs=2),
        "seed": 5,
    }
    return RolloutDataModule(env, **{**defaults, **settings})


def train(tmp_path: Path, folder: Path, env: AgentProgram, iterations: int = 2, **settings: Any) -> list[Rollout]:
    seen = KeepRollouts()
    torch.manual_seed(0)
    make_trainer(tmp_path, iterations, [seen]).fit(make_agent(folder), make_data(env, **settings))
    return seen.rollouts


class Noting(TransformersEngine):
    """Notes what was read for each reply."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[float, ...], tuple[int, ...]] = {}  # by the log-probs of the reply

    async def generate(self, request: SamplingRequest) -> Reply:
        reply = await super().generate(request)
        self.read[reply.logps] = request.prompt.ids
        return reply


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_a_row_holds_before_each_reply_the_very_tokens_that_were_read_for_it(
    tmp_path: Path, tiny_folder: Path, style: str
) -> None:
    engine = Noting()
    rollouts = train(tmp_path, tiny_folder, program(tmp_path, style), engine=engine)
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    placed = [(sample, one) for sample in samples for one in sample.placed_turns()]
    assert len(placed) == 48
    for sample, one in placed:
        assert sample.input.ids[: one.start] == engine.read[one.action.logps]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_calls_that_go_on_share_a_row(tmp_path: Path, tiny_folder: Path, style: str) -> None:
    rollouts = train(tmp_path, tiny_folder, program(tmp_path, style))
    for rollout in rollouts:
        assert len(rollout.turns) == 24
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    rows = sum(len(rollout) for rollout in rollouts)
    assert all(turn.call for turn in turns)
    assert any(turn.terminated for turn in turns)
    if style == "plain":
        begun = {(turn.env, turn.episode) for turn in turns}
        assert rows <= len(begun) + 4 * len(rollouts)  # a row each, and one more where a rollout cuts an episode
    else:
        assert any("You advise" in turn.observation for turn in turns)
        assert rows > len({(turn.env, turn.episode) for turn in turns})


@pytest.mark.slow
def test_equal_runs_are_equal_to_the_bit(tmp_path: Path, tiny_folder: Path) -> None:
    one, other = (train(tmp_path / name, tiny_folder, program(tmp_path, "mixed")) for name in ("a", "b"))
    for first, second in zip(one, other, strict=True):
        assert [turn.reply for turn in first.turns] == [turn.reply for turn in second.turns]
        assert torch.equal(first.rollout_logps, second.rollout_logps)
        assert torch.equal(first.rewards, second.rewards)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "mixed"])
def test_a_run_goes_on_with_agents_that_were_cut_in_the_middle(tmp_path: Path, tiny_folder: Path, style: str) -> None:
    whole = train(tmp_path / "whole", tiny_folder, program(tmp_path, style), iterations=3)
    last = ModelCheckpoint(tmp_path / "part", filename="last", save_on_train_epoch_end=True)
    torch.manual_seed(0)
    make_trainer(tmp_path / "part", 1, [last], enable_checkpointing=True).fit(
        make_agent(tiny_folder), make_data(program(tmp_path, style))
    )
    seen = KeepRollouts()
    make_trainer(tmp_path / "part", 3, [seen]).fit(
        make_agent(tiny_folder), make_data(program(tmp_path, style)), ckpt_path=str(tmp_path / "part" / "last.ckpt")
    )
    for first, second in zip(whole[1:], seen.rollouts, strict=True):
        assert [(turn.call, turn.reply) for turn in first.turns] == [(turn.call, turn.reply) for turn in second.turns]
        assert torch.equal(first.rollout_logps, second.rollout_logps)
        assert torch.equal(first.rewards, second.rewards)


@pytest.mark.slow
def test_agents_that_say_no_reward_are_told(tmp_path: Path, tiny_folder: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(
        SCRIPT.read_text()
        .replace('json.dump({"reward": float(won)}, file)', "pass")
        .replace('os.environ["AGENTRL_RESULT"]', "os.devnull")
    )
    silent = program(tmp_path)
    silent.command[1] = str(script)
    with pytest.raises(ConfigError, match="AGENTRL_RESULT"):
        train(tmp_path, tiny_folder, silent)


def test_wrong_settings_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    good = program(tmp_path)
    with pytest.raises(ValueError, match=r"env.command names the program 'no-such'"):
        make_data(AgentProgram(["no-such"], good.tasks))
    with pytest.raises(ValueError, match=r"env.command names the file 'gone.py'"):
        make_data(AgentProgram([sys.executable, "gone.py"], good.tasks))
    with pytest.raises(ValueError, match=r"no file of tasks 'gone.jsonl' \(key data.init_args.env.tasks\)"):
        make_data(AgentProgram(good.command, "gone.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        make_data(AgentProgram(good.command, str(tmp_path / "empty.jsonl")))
