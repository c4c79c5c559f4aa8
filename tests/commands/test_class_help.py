"""Help on the classes of a config, which needs no config."""

from __future__ import annotations

import sys

import pytest

from lightning_agentrl.commands import main as commands
from tests.cli import Command, run_command, sentence

HELPS = {
    "--model.help PPOAgent": ["--model.init_args.entropy_bonus", "--model.init_args.temperature"],
    "--model.help": ["PPOAgent", "--model.init_args.critic"],
    "--data.help": ["RolloutDataModule", "--data.init_args.num_envs"],
    "--data.init_args.env.help": ["EnvConfig", "--data.init_args.env.retries"],
    "--data.init_args.env.wording.help": ["Wording", "--data.init_args.env.wording.aliases"],
    "--model.init_args.critic.help SharedCritic": ["--model.init_args.critic.init_args.popart"],
    "--model.init_args.kl.reward.help=AdaptiveKL": ["--model.init_args.kl.reward.init_args.target"],
    "--data.init_args.interaction.init_args.parser.help TolerantParser": ["TolerantParser"],
    "--data.init_args.engine.help VLLMServerEngine": ["--data.init_args.engine.init_args.hang_seconds"],
    "--trainer.callbacks.help CriticWarmup": ["--trainer.callbacks.init_args.rounds"],
    "--trainer.callbacks.help EarlyStopping": ["--trainer.callbacks.init_args.monitor"],
}


@pytest.mark.parametrize("asked", HELPS)
def test_the_help_of_a_class_needs_no_config(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "fit", *asked.split()) == 0
    printed = capsys.readouterr().out
    for part in HELPS[asked]:
        assert part in printed


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ("--model.help PPOAgnt", ["'PPOAgnt'", "PPOAgent?"]),
        ("--model.init_args.critic.help", ["SeparateCritic, SharedCritic"]),
        ("--model.init_args.critik.help SharedCritic", ["'critik'", "critic?"]),
        ("--data.init_args.memory.help SharedCritic", ["Memory", "WindowMemory"]),
    ],
)
def test_help_that_does_not_exist_is_told_in_one_sentence(asked: str, parts: list[str], agentrl: Command) -> None:
    message = sentence(agentrl(*asked.split()))
    for part in parts:
        assert part in message


def test_help_of_all_keys_still_comes_from_the_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentrl", "fit", "--help"])
    with pytest.raises(SystemExit):
        commands.main()
    assert "--trainer.max_epochs" in capsys.readouterr().out
