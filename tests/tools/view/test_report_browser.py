"""The page of an inspection in a browser: its tables, and its episodes without anything about iterations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from lightning_agentrl.tools.view import Entry, Report, Table, build_report
from tests.tools.view.logs import make_turn

pytestmark = pytest.mark.browser
MARKUP = "<img src=x onerror='window.hit = 1'>"


def test_a_report_stands_above_its_episodes(tmp_path: Path) -> None:
    turn = make_turn(truncated=True, stop="max_turns", success=False, prompt_tokens=7)
    entry = Entry("valid actions", MARKUP, share=0.5, warning="below 95 %")
    report = Report("a game", [Table("Validity", [entry], about="copy it:", code="wording: {}")])
    path = build_report("Inspection", [report], [turn], "seed: 0", [], tmp_path / "page.html")
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        expect(page.locator(".card .note")).to_have_text("below 95 %")
        expect(page.locator(".card td").nth(1)).to_have_text(MARKUP)
        expect(page.locator(".card pre")).to_have_text("wording: {}")
        assert page.locator("#curves").count() == 0
        assert "KL" not in page.locator("#list").inner_text()
        page.locator("#rows .row").click()
        expect(page.locator(".turn")).to_have_count(1)
        assert "iteration" not in page.locator("#detail").inner_text()
        assert page.evaluate("window.hit") is None
        browser.close()
    assert complaints == []
