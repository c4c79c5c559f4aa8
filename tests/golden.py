"""The sentences that the command answers wrong input with, word for word, in `golden/sentences.txt`.

Tests look for the key to change and the value given; the wording is pinned here only. Write the file anew, and read the
difference, with

    make sentences
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("golden") / "sentences.txt"
_asked: Counter[str] = Counter()


def check_wording(sentence: str) -> None:
    """Compare a sentence with that of the file for the running test, or write it there.

    Of tests/test_cli.py: what other tests are told depends on what is installed.
    """
    file, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    if Path(file).name != "test_cli.py":
        return
    _asked[test] += 1
    name = f"{test} {_asked[test]}"
    known, wording = read(), placeless(sentence)
    if os.environ.get("REWRITE_SENTENCES"):
        write(known | {name: wording})
    else:
        assert f"{name}\n{wording}" == f"{name}\n{known.get(name)}"  # if this is meant: make sentences


def placeless(sentence: str) -> str:
    """Return a sentence without what depends on the machine and on classes that other tests have defined."""
    sentence = re.sub(r"[^\s'\"(]*pytest-of-[^/]+/pytest-[^/]+/(popen-gw\d+/)?[^\s'\"/]+", "TMP", sentence)
    return re.sub(r"(known|names are): [^;()]+", r"\1: …", sentence)


def read() -> dict[str, str]:
    if not FILE.exists():
        return {}
    parts = re.findall(r"^(\S.*)\n    (.*)\n", FILE.read_text(), re.M)
    return dict(parts)


def write(sentences: dict[str, str]) -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(f"{name}\n    {sentences[name]}\n" for name in sorted(sentences)))
