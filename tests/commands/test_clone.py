"""`agentrl clone`: what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import Command, Config, changed, sentence

SAYING = '{"id": "tests.talking_game:Saying-v0", "kwargs": {"messages": [{"role": "user", "content": "Hello."}]}}'


@pytest.fixture
def signs(config: Config) -> Config:
    seen = changed(config, "data.init_args.env", {"id": "tests.signs:Signs-v0"})
    return changed(seen, "data.init_args.interaction.init_args.max_reply_tokens", 16)


def test_the_folder_is_the_model_of_another_run(signs: Config, tmp_path: Path, agentrl: Command) -> None:
    given = ("--out", "cloned", "--steps", "5", "--episodes", "6", "--lr", "0.01")
    assert agentrl(*given, config=signs, command="clone")[0] == 0
    told = json.loads((tmp_path / "cloned" / "summary.json").read_text())
    assert told["before"]["episodes"] == told["after"]["episodes"] == 2
    cloned = changed(signs, "model.init_args.model", str(tmp_path / "cloned"))
    assert agentrl("--dry-run", config=cloned)[0] == 0
    assert "not an empty folder" in sentence(agentrl(*given, config=signs, command="clone"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--out"),
        (("--out", "/proc/x"), "key --out"),
        (("--out", "x", "--steps", "0"), "--steps"),
        (("--out", "x", "--episodes", "0"), "--episodes"),
        (("--out", "x", "--lr", "-1"), "--lr must be above 0, got -1"),
        (("--out", "x", "--action_share", "3"), "--action_share"),
        (("--out", "x", "--recorded", "nowhere"), "nowhere"),
        (("--out", "x", "--ckpt_path", "last"), "export the checkpoint"),
        pytest.param(("--out", "x", "--min_return", "4"), "min_return", marks=pytest.mark.slow),
        (("--out", "x", "--data.init_args.env.kwargs.fault", "raises"), "no way from here"),
        (("--out", "x", "--data.init_args.env", SAYING), "no scripted player"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(
    arguments: tuple[str, ...], part: str, signs: Config, agentrl: Command
) -> None:
    assert part in sentence(agentrl(*arguments, config=signs, command="clone"))


def test_the_config_of_a_run_is_taken(signs: Config, agentrl: Command) -> None:
    """It holds keys of `fit` that cloning has no use for."""
    saved = signs | {"ckpt_path": "last", "weights_only": None, "verbose": True}
    assert "--out" in sentence(agentrl(config=saved, command="clone"))
    code, told = agentrl("--out", "x", "--steps", "1", "--episodes", "4", "--quiet", config=saved, command="clone")
    assert code == 0, told
    assert "not to another command" in sentence(agentrl("--out", "y", "--dry-run", config=saved, command="clone"))
