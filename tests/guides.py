"""The files that a page of docs/guides asks its reader to write."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def write_files(page: str, folder: Path) -> None:
    """Each block of code into the file that is named last before it, behind the block before; none without a name."""
    text = (GUIDES / page).read_text()
    files: dict[str, str] = {}
    for match in re.finditer(r"^```(?:python|yaml)\n(.*?)^```", text, re.M | re.S):
        if names := re.findall(r"`(\w+\.(?:py|yaml))`", text[: match.start()]):
            files[names[-1]] = files.get(names[-1], "") + match[1]
    for name, code in files.items():
        (folder / name).write_text(code)
