"""For the tests of this folder that write config files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files, given as name=text, into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)

    return write
