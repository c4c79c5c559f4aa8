"""The files that a page of docs asks its reader to write."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium

DOCS = Path(__file__).parents[1] / "docs"


def files_of(page: str) -> dict[str, str]:
    """Each block of code in the file that is named last between it and the block before."""
    files, since = {}, 0
    text = (DOCS / page).read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        ending = {"python": "py", "yaml": "yaml", "json": "jsonl"}.get(match[1], "$")
        if names := re.findall(rf"`(\w+\.{ending})`", text[since : match.start()]):
            files[names[-1]] = match[2]
        since = match.end()
    return files


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page."""
    for name, code in files_of(page).items():
        (folder / name).write_text(code)


@contextmanager
def importable(folder: Path) -> Iterator[Path]:
    """Let the modules of a reader's folder be imported, as in a process that has read none of them yet.

    Other tests' modules and environments may have the same names; they are back afterwards.
    """
    names = {file.stem for file in folder.glob("*.py")}
    ids = set(re.findall(r"id=\"([\w-]+)\"", "".join(file.read_text() for file in folder.glob("*.py"))))
    modules = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    specs = {name: gymnasium.registry.pop(name) for name in ids & gymnasium.registry.keys()}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        for name in ids:
            gymnasium.registry.pop(name, None)
        sys.modules.update(modules)
        gymnasium.registry.update(specs)
