"""Pages of results that several benchmarks write, a section each."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def put(page: Path, section: str, text: str) -> None:
    """Replace the section between `<!-- section: NAME -->` and the next such marker; append it if it is missing."""
    old = page.read_text() if page.exists() else ""
    new = f"<!-- section: {section} -->\n\n{text.strip()}\n\n"
    pattern = re.compile(rf"<!-- section: {section} -->.*?(?=<!-- section: |\Z)", re.DOTALL)
    joined = pattern.sub(lambda match: new, old) if pattern.search(old) else f"{old.rstrip()}\n\n{new}"
    page.write_text(joined.strip() + "\n")
