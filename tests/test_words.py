"""One word per idea: no class name is used twice, and words that the project gave up do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_agentrl"

# A word that is not used, as a pattern; what is used in its place; and the files that may use it, with the reason.
BANNED: dict[str, tuple[str, dict[str, str]]] = {
    "trajector(y|ies)": (
        "episode",
        {},
    ),
    "collectors?": (
        "collection",
        {},
    ),
    "completions?|generations?|responses?": (
        "reply, or sampling",
        {
            f"{PACKAGE}/view/chunks.js": "a class of browsers",
            "docs/reliability.md": "a role marker of other templates",
            "docs/other_trainers.md": "keys of other trainers",
        },
    ),
    "read-outs?": (
        "logit position",
        {
            f"{PACKAGE}/view/build.py": "the box with the numbers of a token",
            f"{PACKAGE}/view/tokens.js": "the box with the numbers of a token",
            f"{PACKAGE}/view/curves.js": "the box with the numbers of a point",
        },
    ),
    "close_ids": ("stop_token_ids", {}),
    "digits?": (
        "precision",
        {
            f"{PACKAGE}/models/demo.py": "characters that a tokenizer splits",
            f"{PACKAGE}/view/build.py": "of printed numbers",
            f"{PACKAGE}/view/format.js": "of printed numbers",
            f"{PACKAGE}/callbacks/turn_record.py": "of printed numbers",
            "docs/troubleshooting.md": "the last digits of sums",
        },
    ),
    "foretells?|foretold": ("predict", {}),
    "(is|are) no (file|folder|json)s?": (
        "is not a file",
        {
            f"{PACKAGE}/episodes/tasks.py": "there is none",
        },
    ),
    "nobody waits for any more": ("after training ended", {}),
    "come home": ("are complete", {}),
}


def texts() -> dict[str, str]:
    """Return what readers see, by path: package, environments, configs and docs, without recorded results."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/**/*.md"), *ROOT.glob("docs/*.py")]
    for folder in (PACKAGE, "envs", "configs"):
        found += [path for kind in ("py", "js", "html", "yaml") for path in (ROOT / folder).rglob(f"*.{kind}")]
    history = ROOT / "CHANGELOG.md"
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found if path != history}


@pytest.mark.parametrize("word", BANNED)
def test_words_that_were_given_up_stay_away(word: str) -> None:
    instead, exceptions = BANNED[word]
    pattern = re.compile(rf"\b({word})\b", re.IGNORECASE)
    found = {path for path, text in texts().items() if pattern.search(text)}
    assert found == set(exceptions), f"say '{instead}', and drop exceptions that are no longer needed"


@pytest.mark.slow
def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
