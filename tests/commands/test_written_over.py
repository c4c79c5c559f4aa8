"""What a command writes replaces only what it has written before."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_agentrl.commands.files import PAGE
from lightning_agentrl.commands.view import view_runs
from lightning_agentrl.errors import ConfigError
from tests.tools.view.logs import make_turn, write_log


def view(run: Path, out: Path) -> bytes:
    view_runs(run, None, out, None, serve=False, port=None)
    return out.read_bytes()


def test_a_page_is_written_over_a_page_and_over_nothing_else(tmp_path: Path) -> None:
    write_log(tmp_path, [make_turn(reply="first")])
    before = view(tmp_path, tmp_path / "one.html")
    write_log(tmp_path, [make_turn(reply="first"), make_turn(turn=1)])
    assert view(tmp_path, tmp_path / "one.html") != before
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match=r"notes.txt' exists and was not written.*--out"):
        view(tmp_path, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "kept"
    (tmp_path / "view.html").write_text("kept, too")
    with pytest.raises(ConfigError, match=r"view.html' exists and was not written.*--out"):
        view_runs(tmp_path, None, None, None, serve=False, port=None)
    assert (tmp_path / "view.html").read_text() == "kept, too"
    (tmp_path / "empty").touch()
    assert view(tmp_path, tmp_path / "empty").startswith(PAGE)
