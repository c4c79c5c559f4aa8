"""The files that a page of docs/guides asks its reader to write."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def write_files(page: str, folder: Path) -> None:
    """Each block of code into the file that is named last before it."""
    text = (GUIDES / page).read_text()
    for match in re.finditer(r"^```(?:python|yaml)\n(.*?)^```", text, re.M | re.S):
        *_, name = re.findall(r"`(\w+\.(?:py|yaml))`", text[: match.start()])
        (folder / name).write_text(match[1])
