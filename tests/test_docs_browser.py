"""The documentation in a browser of 1280 pixels: no page is cut, and code that is too long wraps or shows a bar."""

from __future__ import annotations

import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.test_docs import Site, site

__all__ = ["site"]  # the fixture
pytestmark = pytest.mark.browser

CUT = """() => {
  const long = [...document.querySelectorAll('.md-content pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const hidden = long.filter(e => {
    const style = getComputedStyle(e);
    return !['auto', 'scroll'].includes(style.overflowX) || style.scrollbarColor.startsWith('rgba(0, 0, 0, 0)');
  });
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth ? ['the page'] : [];
  return {long: long.length, cut: [...wide, ...hidden.map(e => e.textContent.slice(0, 80))]};
}"""


def test_code_wraps_or_scrolls(site: Site) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "install chromium (make chromium)"
    long = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for path in sorted(site.pages):
            if not path.name.startswith("inspect_"):  # pages of the package, not of the documentation
                page.goto(path.as_uri())
                found = page.evaluate(CUT)
                assert not found["cut"], (path.name, found["cut"])
                long += found["long"]
        browser.close()
    assert long  # there is code that has to scroll
