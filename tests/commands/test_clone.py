"""`agentrl clone`: what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout.demonstrations import check_game
from tests.cli import Command, Config, changed, sentence

SAYING = '{"id": "tests.talking_game:Saying-v0", "kwargs": {"messages": [{"role": "user", "content": "Hello."}]}}'


@pytest.fixture
def signs(config: Config) -> Config:
    seen = changed(config, "data.init_args.env", {"id": "tests.signs:Signs-v0"})
    return changed(seen, "data.init_args.interaction.init_args.max_reply_tokens", 16)


@pytest.mark.slow
def test_the_folder_is_the_model_of_another_run(signs: Config, tmp_path: Path, agentrl: Command) -> None:
    given = ("--out", "cloned", "--steps", "5", "--episodes", "6", "--lr", "0.01")
    assert agentrl(*given, config=signs, command="clone")[0] == 0
    record = json.loads((tmp_path / "cloned" / "summary.json").read_text())
    assert record["before"]["episodes"] == record["after"]["episodes"] == 2
    cloned = changed(signs, "model.init_args.model", str(tmp_path / "cloned"))
    assert agentrl("--dry-run", config=cloned)[0] == 0
    assert "not an empty folder" in sentence(agentrl(*given, config=signs, command="clone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--out"),
        (("--out", "/proc/x"), "key --out"),
        (("--out", "x", "--lr", "-1"), "optim.lr_actor must be at least 0, got -1"),
        (("--out", "x", "--action_share", "3"), "action_share"),
        (("--out", "x", "--recorded", "nowhere"), "nowhere"),
        (("--out", "x", "--recorded", "nowhere", "--episodes", "5"), "--episodes is for scripted players"),
        (("--out", "x", "--ckpt_path", "last"), "agentrl export"),
        pytest.param(("--out", "x", "--min_return", "4"), "min_return", marks=pytest.mark.slow),
        (("--out", "x", "--data.init_args.env.kwargs.fault", "raises"), "no way from here"),
        (("--out", "x", "--data.init_args.env", SAYING), "no scripted player"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(
    arguments: tuple[str, ...], part: str, signs: Config, agentrl: Command
) -> None:
    assert part in sentence(agentrl(*arguments, config=signs, command="clone"))


@pytest.mark.slow
def test_the_config_of_a_run_is_taken(signs: Config, agentrl: Command) -> None:
    """It holds keys of `fit` that cloning has no use for."""
    saved = signs | {"ckpt_path": "last", "weights_only": None, "verbose": True}
    assert "--out" in sentence(agentrl(config=saved, command="clone"))
    code, printed = agentrl("--out", "x", "--steps", "1", "--episodes", "4", "--quiet", config=saved, command="clone")
    assert code == 0, printed
    assert "--dry-run plans a training run" in sentence(
        agentrl("--out", "y", "--dry-run", config=saved, command="clone")
    )


@pytest.mark.slow
def test_a_recorded_run_of_another_game_is_refused(signs: Config, agentrl: Command) -> None:
    recorded = changed(signs, "trainer.callbacks", [{"class_path": "TurnLog"}])
    recorded = changed(recorded, "trainer.default_root_dir", "recorded")
    recorded = changed(recorded, "data.init_args.turns_per_env", 4)
    code, message = agentrl(config=changed(recorded, "data.init_args.env.kwargs", {"fault": ""}))
    assert code == 0, message
    other = changed(signs, "data.init_args.env.kwargs", {"fault": "jumps"})
    message = sentence(agentrl("--out", "x", "--recorded", "recorded", config=other, command="clone"))
    assert "the run 'recorded' played tests.signs:Signs-v0 with {'fault': ''}, and the config has" in message
    assert "(--recorded)" in message


@pytest.mark.parametrize("recorded", ["", "A with {}", "A with {} (share 1) and B with {'x': 'a and b'} (share 0.5)"])
def test_a_run_of_some_of_the_games_is_taken(recorded: str) -> None:
    check_game(recorded, ["A with {}", "B with {'x': 'a and b'}", "C with {}"], "run")
    with pytest.raises(ConfigError, match=r"played .* and the config has C with \{\}") if recorded else nullcontext():
        check_game(recorded, ["C with {}"], "run")
