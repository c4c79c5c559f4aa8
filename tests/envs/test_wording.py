"""The words of a game as data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl_envs.wording import read_wording

FILE = '''
system_prompt = """
Walk to {goal}.
"""
default_action = "go"

[actions]
go = "one step"
turn = "to the left"

[aliases]
go = ["walk", "go on"]

[texts]
bump = "You bump into {what}."
'''


def test_a_file_beside_the_code_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "walking_game"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "wording.toml").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    wording = read_wording("walking_game")
    monkeypatch.delitem(sys.modules, "walking_game")
    assert wording.system_prompt == "Walk to {goal}."
    assert list(wording.actions) == ["go", "turn"]
    assert wording.default_action == "go"
    assert wording.aliases == {"walk": "go", "go on": "go"}
    assert wording.texts == {"bump": "You bump into {what}."}
