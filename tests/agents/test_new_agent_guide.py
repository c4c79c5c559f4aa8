"""The agent of docs/extend.md, from a file of its own, does what the page says."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_agentrl.agents import KL
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.types import Rollout, Sample
from tests.agents.harness import KeepRollouts, make_data, make_trainer
from tests.agents.processes import metrics
from tests.cli import Command, Config, changed, sentence, three_iterations
from tests.guides import importable, write_files
from tests.types.samples import action, glue, prompt, turn


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The reader's, with the files of the page."""
    write_files("extend.md", tmp_path)
    with importable(tmp_path):
        yield tmp_path


def with_agent(folder: Path, config: Config) -> Config:
    """The config with the page's file over it."""
    given = yaml.safe_load((folder / "agent.yaml").read_text())["model"]
    model = {"class_path": given["class_path"], "init_args": config["model"]["init_args"] | given["init_args"]}
    return {**config, "model": model}


def test_a_bonus_lies_on_the_last_token_of_its_turn_and_shrinks_with_the_count(folder: Path) -> None:
    """At `a` twice and at `b` once; then everything once more."""
    agent = importlib.import_module("my_agent").CountBonusAgent(bonus=0.1, model="not read here")
    row = (prompt(1), action(11, 12), glue(7), action(13))
    rollout = Rollout.from_samples(
        [
            Sample(row, (turn(observation="a", reward=0.5), turn(observation="b", index=1, reward=-1.0))),
            Sample((prompt(1), action(14, 15)), (turn(observation="a", env=1),)),
        ]
    )
    agent.count(rollout.turns)
    want = torch.tensor([[0.0, 0.5 + 0.1 / sqrt(2), -1.0 + 0.1], [0.0, 0.1 / sqrt(2), 0.0]])
    torch.testing.assert_close(agent.shape_rewards(rollout), want)
    agent.count(rollout.turns)
    want = torch.tensor([[0.0, 0.5 + 0.1 / sqrt(4), -1.0 + 0.1 / sqrt(2)], [0.0, 0.1 / sqrt(4), 0.0]])
    torch.testing.assert_close(agent.shape_rewards(rollout), want)
    assert rollout.rewards.tolist() == [[0.0, 0.5, -1.0], [0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_the_command_trains_it_and_scores_stay_those_of_the_environment(
    folder: Path, config: Config, agentrl: Command
) -> None:
    """What is logged in each of three iterations, against the turns that were played."""
    config = three_iterations(with_agent(folder, config))
    config["data"]["init_args"] |= {
        "env": {"id": "agentrl_envs:GuessNumber-v0", "kwargs": {"highest": 9, "max_turns": 6}},
        "turns_per_env": 8,
        "mini_batch_turns": 16,
    }
    config["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": "devices"}}
    code, printed = agentrl(config=config)
    assert code == 0, printed
    logged = [row for row in metrics(folder) if "exploration/pairs" in row]
    (log,) = folder.rglob("turns/rank0-*.jsonl")
    turns: list[dict[str, Any]] = [json.loads(line) for line in log.open()]
    assert len(logged) == 3
    visits: Counter[tuple[str, str]] = Counter()
    for iteration, row in enumerate(logged, start=1):
        played = [t for t in turns if t["iteration"] == iteration]
        visits.update((t["observation"], t["action"]) for t in played)
        assert row["exploration/pairs"] == len(visits)
        ended = [t for t in played if t["terminated"] or t["truncated"]]
        assert ended
        assert row["rollout/return"] == pytest.approx(sum(t["episode_return"] for t in ended) / len(ended))
        assert row["rollout/success"] == pytest.approx(sum(t["success"] for t in ended) / len(ended))
        assert row["rollout/reward_per_turn"] == pytest.approx(sum(t["reward"] for t in played) / len(played))
    assert len(visits) > 3
    checkpoint = max(folder.rglob("iteration-*.ckpt"))
    assert torch.load(checkpoint, weights_only=True)["visits"] == dict(visits)


def test_a_warm_up_counts_each_turn_once(folder: Path, tiny_folder: Path) -> None:
    """Also where its rollout, which it prepares in each round, has no log-probs: one step an iteration and no KL."""
    agent_class = importlib.import_module("my_agent").CountBonusAgent
    agent = agent_class(model=str(tiny_folder), critic=SeparateCritic(), kl=KL(reward=0.0))
    warm_up, played = CriticWarmup(rollouts=1, rounds=2, fraction=1.0), KeepRollouts()
    make_trainer(folder, 2, [warm_up, played]).fit(agent, make_data(mini_batch_turns=16))
    assert sum(agent.visits.values()) == sum(len(rollout.turns) for rollout in played.rollouts) == 16


def test_keys_that_it_hands_on_are_known_by_name(folder: Path, config: Config, agentrl: Command) -> None:
    given = changed(with_agent(folder, config), "model.init_args.lr_actr", 1e-3)
    message = sentence(agentrl(config=given))
    for part in ("model.init_args.lr_actr", "CountBonusAgent", "did you mean optim.lr_actor?"):
        assert part in message
