"""The command `agentrl check-env`: exit codes, files, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli import run_command
from tests.disks import mounted

QUESTION = "tests.tools.check_env.defects:Question-v0"


def test_errors_are_the_exit_code_and_files_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "told.json"), "--html", str(tmp_path / "told.html"), "--seconds", "5", "--train"]
    assert run_command(monkeypatch, "check-env", QUESTION, "--kwargs", '{"defect": "wrong answer"}', *files) == 1
    record = json.loads((tmp_path / "told.json").read_text())
    found = {one["check"]: one for one in record["findings"]}
    assert found["oracle.max"]["openenv"] == "semantic.oracle_max"
    assert not record["passed"]
    assert record["kwargs"] == {"defect": "wrong answer"}
    assert record["cut"] == {}
    assert record["train"]["said"] == "not tried: there are errors to mend first"
    assert "oracle.max" in (tmp_path / "told.html").read_text()
    assert "oracle.max" in capsys.readouterr().out


@pytest.mark.long
def test_a_small_policy_climbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["agentrl_envs:Bandit-v0", "--train", "--json", str(tmp_path / "told.json")]
    assert run_command(monkeypatch, "check-env", *given) == 0
    assert json.loads((tmp_path / "told.json").read_text())["train"]["verdict"] == "climbs"


def test_a_cap_within_the_first_part_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first part cannot end before the cap, on any machine: making the environment takes longer."""
    given = ["tests.tools.check_env.odd:Odd-v0", "--kwargs", '{"what": "takes for ever to make"}', "--cap", "0.001"]
    assert run_command(monkeypatch, "check-env", *given) == 2
    assert "there are no findings" in capsys.readouterr().err


def test_training_that_fails_loses_no_certificate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--kwargs", '{"what": "no reset in a trainer"}', "--seconds", "3", "--train"]
    assert run_command(monkeypatch, "check-env", "tests.tools.check_env.odd:Odd-v0", *given) == 0
    out = capsys.readouterr().out
    assert "passed, 0 errors" in out
    assert "training: not tried: it ended with an error" in out


@pytest.mark.parametrize(
    "given",
    [
        ["tests.tools.check_env.defects:Nothing-v0"],
        [QUESTION, "--seconds", "0"],
        [QUESTION, "--kwargs", '{"a": 1}'],
        [QUESTION, "--kwargs", '{"token": "x"}'],
    ],
)
def test_what_cannot_be_checked_is_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "check-env", *given) == 2
    assert capsys.readouterr().err.startswith("agentrl: ")


def test_an_address_with_a_password_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The certificate would hold it."""
    assert run_command(monkeypatch, "check-env", "http://me:sk-0123@127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert "${PASSWORD}" in said
    assert "sk-0123" not in said


def test_one_file_for_json_and_page_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "a"), "--html", str(tmp_path / ".." / tmp_path.name / "a")]
    assert run_command(monkeypatch, "check-env", QUESTION, *files, "--seconds", "1") == 2
    answer = capsys.readouterr()
    assert "the same file" in answer.err
    assert not answer.out


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", "16k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert run_command(monkeypatch, "check-env", QUESTION, "--json", str(disk / "told.json")) == 2
    answer = capsys.readouterr()
    assert f"'{disk}/told.json' cannot be written" in answer.err
    assert "--json" in answer.err
    assert not answer.out


def test_a_folder_in_place_of_a_page_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "check-env", QUESTION, "--html", str(tmp_path)) == 2
    answer = capsys.readouterr()
    assert f"'{tmp_path}' is a folder" in answer.err
    assert not answer.out
