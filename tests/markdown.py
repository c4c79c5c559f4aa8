"""What a page of Markdown says: its blocks, the code within its sentences, and its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from textwrap import dedent


def fences(text: str) -> list[tuple[str, str]]:
    """Language and content of the fenced blocks."""
    return [(m[2], dedent(m[3])) for m in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.M | re.S)]


def inline(text: str) -> list[str]:
    """Code within sentences and tables."""
    rest = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.M | re.S)
    return [code.replace("\\|", "|") for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", rest)]


def code_lines(text: str) -> Iterator[str]:
    """Lines of commands, joined where they go on, and code within sentences."""
    for language, block in fences(text):
        if language in ("", "bash"):
            yield from re.sub(r"\\\n\s*", "", block).splitlines()
    yield from inline(text)


def agentrl_lines(text: str) -> Iterator[list[str]]:
    """Arguments of each `agentrl` command."""
    for line in code_lines(text):
        if match := re.match(r"(?:\w+=\S+ )*(?:\.venv/bin/)?agentrl(?= |$)(.*)", line.strip()):
            yield shlex.split(match[1], comments=True)
