"""The runs that a guide asks its reader to start, with the files that it asks to write, as far as `--dry-run` goes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli import Command
from tests.guides import DOCS, files_of, importable, write_files
from tests.markdown import agentrl_lines

CONFIGS = DOCS.parent / "configs"
AGENTS = "agents.md"  # its files are in the repository
URL = "by_url.yaml"  # needs a server: tests/commands/test_environment_by_url_guide.py


def runs_of(page: str) -> list[list[str]]:
    """Arguments of the page's `agentrl fit` commands with a config of that page."""
    files, lines = files_of(page), agentrl_lines((DOCS / page).read_text())
    runs = [line[1:] for line in lines if line[:1] == ["fit"] and "--config" in line]
    own = [run for run in runs if page == AGENTS or (files.keys() - {URL}) & {*run}]
    return [[part for part in run if part != "--dry-run"] for run in own]


EVERY = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
PAGES = [page for page in EVERY if runs_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_its_runs_could_start(
    page: str, tmp_path: Path, tiny_folder: Path, agentrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(CONFIGS)
    (tmp_path / "docs").symlink_to(CONFIGS.parent / "docs")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # for programs of a guide
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    if page == AGENTS:  # some of its runs show tools
        shutil.copy(CONFIGS.parent / "lightning_agentrl" / "models" / "demo_tools.jinja", model / "chat_template.jinja")
    small = ("--model.init_args.model", str(model), "--data.init_args.prompt.max_prompt_tokens", "1790")
    write_files(page, tmp_path)
    with importable(tmp_path):
        for arguments in runs_of(page):
            code, said = agentrl(*arguments, *small, "--dry-run")
            assert code == 0, said


def test_most_guides_have_a_run() -> None:
    assert {"extend.md", "environments.md", AGENTS} <= set(PAGES)
    assert len(runs_of("extend.md")) > 9
