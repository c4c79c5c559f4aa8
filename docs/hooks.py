"""Hooks of mkdocs: include files of the repository in pages and show the project's pictures as part of the page."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of a page."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """Replace `<!-- include: FILE -->` by the file: a page without its title, Python code as a block."""
    return INCLUDE.sub(lambda match: _included(match[1]), markdown)


def _included(name: str) -> str:
    text = (REPOSITORY / name).read_text()
    if name.endswith(".py"):
        return f"```python\n{text}```"
    return text.split("\n", 1)[1].strip().replace("](docs/", "](")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline pictures of the pages' folder, so that they follow the colors of the page."""
    return re.sub(r'<img alt="([^"]*)" src="(\w+\.svg)"[^>]*>', lambda match: _inlined(match[2], config), html)


def _inlined(name: str, config: MkDocsConfig) -> str:
    return f'<div class="scrolled">{Path(config.docs_dir, name).read_text()}</div>'
