"""`agentrl inspect`: its summary, its page, and what it leaves alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_agentrl.commands import inspect
from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.tools.inspect import (
    Average,
    Failure,
    SeenEpisode,
    SeenTurn,
    Spread,
    Thoughts,
    look_at,
    make_report,
)
from lightning_agentrl.types import Sample, StopReason, Turn
from tests.cli import Command, Config, changed, run_command, sentence
from tests.tiny import tiny_tokenizer
from tests.types.samples import action, growing, prompt, turn

GUESS = {"id": "agentrl_envs:GuessNumber-v0"}


def seen(turns: list[Turn], said: str, actions: dict[str, str]) -> SeenEpisode:
    return SeenEpisode(tuple(SeenTurn(each, "", said, 9, 3) for each in turns), actions)


def test_the_report_suggests_aliases_as_a_part_of_the_config() -> None:
    end: dict[str, Any] = {"index": 1, "truncated": True, "stop": StopReason.MAX_TURNS, "success": False}
    turns = [turn(valid=False, parsed_action=None), turn(valid=False, parsed_action=None, **end)]
    look = look_at([seen(turns, 'please: "go" left', {"left": "left"})])
    report = make_report("a game", look, "data.init_args.envs[1]", 100, 20)
    (table,) = [table for table in report.tables if table.code]
    assert yaml.safe_load(table.code) == {"wording": {"aliases": {'please: "go" left': "left"}}}
    assert "data.init_args.envs[1]" in table.about
    assert "95.0 %" in report.text()
    assert table.code.splitlines()[-1] in report.text()


def test_a_report_without_fault_has_no_warning() -> None:
    ends = [turn(terminated=True, stop=StopReason.ENV_DONE, success=i == 0, observation=str(i)) for i in range(2)]
    look = look_at([seen([end], "", {"open": "open"}) for end in ends])
    report = make_report("a game", look, "data.init_args.env", 100, 20)
    assert [row.warning for table in report.tables for row in table.rows if row.warning] == []


THOUGHTS = Thoughts(count=9, missing=0, distinct={1: 0.5}, within=0.5, similarity=0.5, equal=0.5, copied=0.4)
REMARKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("success", {"successes": 0, "returns": Average(0.0, 0.0)}, {"successes": 0, "returns": Average(0.5, 0.1)}),
    ("success", {"successes": 20}, {"successes": 19}),
    ("valid actions", {"valid": 94}, {"valid": 95}),
    ("stuck or in a loop", {"failures": {Failure.LOOP: 1, Failure.STUCK: 1, Failure.DEATH: 1}}, {"failures": {}}),
    ("actions that changed nothing", {"no_ops": {"left": 6}}, {"no_ops": {"left": 5}}),
    ("“left”", {"actions": {"left": 95, "right": 5}}, {"actions": {"left": 90, "right": 10}}),
    ("copied from the prompt", {"thoughts": replace(THOUGHTS, copied=0.6)}, {"thoughts": THOUGHTS}),
    ("prompts with history cut", {"cut": 11}, {"cut": 10}),
    ("replies cut by the limit", {"capped": 6}, {"capped": 5}),
]


@pytest.mark.parametrize(("name", "bad", "good"), REMARKS)
def test_a_remark_is_made_beyond_its_bound(name: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    look = replace(look_at([seen([turn()], "", {})]), episodes=20, successes=5, turns=100, valid=100, followed=10)

    def warned(**changes: Any) -> list[str]:
        report = make_report("a game", replace(look, **changes), "data.init_args.env", 100, 20)
        return [row.name for table in report.tables for row in table.rows if row.warning]

    assert warned(**bad) == [name]
    assert warned(**good) == []


@pytest.mark.parametrize(("thought_tokens", "shorter"), [(None, "replies"), (Spread.of([4]), "thoughts")])
def test_replies_without_a_thought_have_none_to_shorten(thought_tokens: Spread | None, shorter: str) -> None:
    look = replace(look_at([seen([turn()], "", {})]), turns=100, capped=90, thought_tokens=thought_tokens)
    report = make_report("a game", look, "data.init_args.env", 100, 20)
    (remark,) = [
        row.warning for table in report.tables for row in table.rows if "cut by the limit" in row.name and row.warning
    ]
    assert remark.endswith(f"ask for shorter {shorter}")


def test_prompts_are_all_that_was_read_before_a_reply() -> None:
    """Also in a sample that grows."""
    played = WholeEpisode(0, 0, Contract(actions={"open": ""}, aliases={}), growing()[:1], "timeout")
    (found,) = inspect._seen(played, tiny_tokenizer())
    assert [(each.prompt_tokens, each.reply_tokens) for each in found.turns] == [(2, 2), (7, 1), (9, 2)]
    assert found.lost


def test_each_side_of_a_game_is_looked_at_by_itself() -> None:
    samples = [Sample((prompt(1), action(2)), (turn(episode=k % 2, index=k // 2),)) for k in range(4)]
    played = WholeEpisode(0, 0, Contract(), samples, "")
    sides = [[one.turn.episode for one in found.turns] for found in inspect._seen(played, tiny_tokenizer())]
    assert sides == [[0, 0], [1, 1]]


def test_texts_of_a_report_cannot_become_html() -> None:
    bad = "<script>alert(1)</script>"
    look = look_at([seen([turn(valid=False, parsed_action=None, truncated=True, stop=StopReason.MAX_TURNS)], bad, {})])
    assert "<script" not in make_report(bad, look, bad, 100, 20).html()


def test_a_mixed_run_is_looked_at_source_by_source(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del config["data"]["init_args"]["env"]
    config["data"]["init_args"]["envs"] = [GUESS, {"id": "agentrl_envs:Bandit-v0"}]
    config["data"]["init_args"]["prompt"] = {"think": False, "max_prompt_tokens": 500}
    config["trainer"] |= {"logger": True, "callbacks": [{"class_path": "TurnLog"}, {"class_path": "RunSummary"}]}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    write = inspect.build_report
    monkeypatch.setattr(inspect, "build_report", lambda *given: (shown.extend(given), write(*given))[1])
    assert run_command(monkeypatch, "inspect", "--config", "given.yaml", "--episodes", "6") == 0
    printed = capsys.readouterr().out
    _, _, turns, _, notes, _ = shown
    firsts = [each["reply"] for each in turns if each["observation"] == turns[0]["observation"]]
    assert len(set(firsts)) > 1  # sampled, at the temperature of training
    assert notes == []  # nothing was lost
    most = config["data"]["init_args"]["interaction"]["init_args"]["max_reply_tokens"]
    limits = [r"prompt .* of 500$", rf"reply .* of {most}$"]
    assert [len(re.findall(limit, printed, re.M)) for limit in limits] == [2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml", "inspect.html"}  # nothing else is written
    page = (tmp_path / "inspect.html").read_text()
    for source in ("GuessNumber-v0", "Bandit-v0"):
        assert source in printed
        assert source in page
    counts = re.findall(r"success .* of (\d+)$", printed, re.M)
    assert sum(map(int, counts)) == 6
    assert len(counts) == 2
    assert printed.count("valid actions") >= 2
    assert 'id="text-0"' in page  # the episodes, turn by turn


@pytest.mark.slow
def test_a_checkpoint_is_looked_at_and_wrong_input_is_told(config: Config, agentrl: Command, tmp_path: Path) -> None:
    config = changed(config, "data.init_args.env", GUESS)
    assert agentrl(config=config)[0] == 0
    (saved,) = tmp_path.rglob("iteration-*.ckpt")
    given = ["--episodes", "2", "--out", "pages/one.html"]
    assert agentrl("--ckpt_path", str(saved), *given, config=config, command="inspect")[0] == 0
    assert saved.name in (tmp_path / "pages" / "one.html").read_text()
    for arguments, part in (
        (["--episodes", "0"], "--episodes"),
        (["--out", "pages"], "--out"),
        (["--ckpt_path", "missing.ckpt"], "missing.ckpt"),
        (["--episods", "3"], "episods"),
    ):
        assert part in sentence(agentrl(*arguments, config=config, command="inspect"))
