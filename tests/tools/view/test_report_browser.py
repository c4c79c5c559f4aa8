"""The page of an inspection in a browser: its tables, and its episodes without anything about iterations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from lightning_agentrl.tools.view import Entry, Report, Table, build_comparison, build_report
from tests.tools.view.logs import Turn, make_turn

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


def test_episodes_of_several_policies_stand_side_by_side(tmp_path: Path) -> None:
    """Three policies on two seeds of two games: one line for each seed, the policies in columns."""

    def turns(*solved: bool) -> list[Turn]:
        places = [(source, env) for source in ("Maze-v0", "Bandit-v0") for env in (0, 1)]
        ends = {"truncated": True, "stop": "max_turns", "phase": "evaluate"}
        return [
            make_turn(env=env, source=source, success=won, episode_return=float(won), **ends)
            for (source, env), won in zip(places, solved, strict=True)
        ]

    runs = [("one", turns(True, True, False, False)), ("other", turns(True, False, False, True))]
    runs.append(("random", turns(True, False, False, False)))
    report = Report("Maze-v0", [Table("A one", [Entry("success", "100 %")])])
    path = build_comparison("Evaluation", [report], runs, "data: {}", ["a note"], tmp_path / "page.html")
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        rows = page.locator("#rows .row")
        expect(rows).to_have_count(4)
        found = sorted(
            (row.locator("span").nth(2).inner_text(), row.locator("span").nth(0).inner_text()) for row in rows.all()
        )
        assert found == [("Bandit-v0", "B only"), ("Bandit-v0", "none"), ("Maze-v0", "A only"), ("Maze-v0", "all")]
        rows.first.click()
        expect(page.locator("#rows .row[aria-current=true]")).to_have_count(1)
        page.get_by_label("Episodes", exact=True).last.select_option("Maze-v0")
        expect(rows).to_have_count(2)
        page.locator("[data-show=a]").click()
        expect(rows).to_have_count(1)
        rows.click()
        expect(page.locator("#detail article.turn")).to_have_count(3)
        assert "Maze-v0, held-out seed 1" in page.locator("#bar").inner_text()
        assert "iteration" not in page.locator("#detail").inner_text()
        page.screenshot(path=str(tmp_path / "page.png"))
        browser.close()
    assert complaints == []
