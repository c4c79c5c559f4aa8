from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from lightning_agentrl.tools.view import build_page
from lightning_agentrl.tools.view.serve import PageServer
from tests.pictures import seconds_to_open
from tests.tools.view.logs import Turn, make_turn, random_turns, write_log, write_run

pytestmark = pytest.mark.browser

RED_DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
XSS = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "install chromium (make chromium)"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@dataclass
class Watched:
    """An open page with everything it asked for and complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser):
    """Opens a file and checks at the end that the page asked for nothing else and complained about nothing."""
    watched: list[Watched] = []

    def note_request(w: Watched, request: Request) -> None:
        if not request.url.startswith("data:"):
            w.requests.append(request.url)

    def open_(path: Path, hash_: str = "", phone: bool = False) -> Page:
        size = {"width": 390, "height": 844} if phone else {"width": 1440, "height": 900}
        context = browser.new_context(viewport=size, has_touch=phone, is_mobile=phone)
        w = Watched(context.new_page())
        w.page.set_default_timeout(15_000)
        w.page.on("request", lambda request: note_request(w, request))
        w.page.on("console", lambda message: w.complaints.append(message.text))
        w.page.on("pageerror", lambda error: w.complaints.append(str(error)))
        watched.append(w)
        w.page.goto(path.as_uri() + hash_)
        expect(w.page.locator("#rows .row").first).to_be_attached()
        return w.page

    yield open_
    for w in watched:
        assert w.complaints == []
        assert len(set(w.requests)) == 1, w.requests
        assert w.requests[0].startswith("file:")
        w.page.context.close()


@pytest.fixture(scope="module")
def turns() -> list[Turn]:
    return random_turns(1500, seed=3)


@pytest.fixture(scope="module")
def run_page(turns, tmp_path_factory) -> Path:
    return build_page(write_run(tmp_path_factory.mktemp("runs") / "goto", turns))


@pytest.fixture(scope="module")
def episodes(turns) -> dict[str, list[Turn]]:
    """Turns by the "env.episode" of the page."""
    grouped = defaultdict(list)
    for turn in turns:
        grouped[f"{turn['env']}.{turn['episode']}"].append(turn)
    return dict(grouped)


def listed(page: Page) -> list[str]:
    """Episodes on all pages of the list, in order."""
    found: list[str] = []
    while True:
        found += page.locator("#rows .row").evaluate_all("rows => rows.map((row) => row.dataset.id)")
        following = page.locator("#pages button", has_text="next")
        if not following.count() or not following.is_visible() or following.is_disabled():
            return found
        following.click()


def ended(played: list[Turn]) -> bool:
    return played[-1]["stop"] is not None


def won(played: list[Turn]) -> bool:
    last = played[-1]
    return ended(played) and (last["episode_return"] > 0 if last["success"] is None else last["success"])


def mean_kl(played: list[Turn]) -> float:
    gaps = [a - b for t in played for a, b in zip(t["old_logps"], t["ref_logps"], strict=True)]
    return sum(gaps) / len(gaps)


def number(text: str) -> float:
    return float(text.replace("−", "-"))


# The list


def test_the_list_shows_every_episode_newest_first(opened, run_page, episodes):
    page = opened(run_page)
    assert page.locator("#rows .row").count() == 100  # never all at once
    ids = listed(page)
    assert sorted(ids) == sorted(episodes)
    last = [episodes[i][-1]["iteration"] for i in ids]
    assert last == sorted(last, reverse=True)


@pytest.mark.parametrize(
    ("label", "belongs"),
    [
        ("failed", lambda played: ended(played) and not won(played)),
        ("solved", won),
        ("invalid reply", lambda played: not all(t["valid"] for t in played)),
        ("token cap", lambda played: any(t["hit_token_cap"] for t in played)),
    ],
)
def test_a_filter_keeps_the_right_episodes(opened, run_page, episodes, label, belongs):
    page = opened(run_page)
    right = {i for i, played in episodes.items() if belongs(played)}
    assert 0 < len(right) < len(episodes)
    button = page.locator("#shows button", has_text=label)
    assert button.inner_text().replace(",", "").endswith(str(len(right)))
    button.click()
    ids = listed(page)
    assert len(ids) == len(right)
    assert set(ids) == right


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("longest", lambda played: -(played[-1]["turn"] + 1)),
        ("kl", lambda played: -mean_kl(played)),
        ("return", lambda played: played[-1]["episode_return"]),
    ],
)
def test_an_order_sorts_by_its_number(opened, run_page, episodes, order, key):
    page = opened(run_page)
    page.select_option("#sort", order)
    keys = [key(episodes[i]) for i in listed(page)]
    assert len(keys) == len(episodes)
    assert all(a <= b + 1e-4 * abs(b) for a, b in pairwise(keys))  # the page rounds


def test_search_looks_into_replies_and_observations(opened, run_page, episodes, turns):
    page = opened(run_page)
    for word in (turns[700]["thought"].split()[-1], turns[900]["observation"].split()[-2].upper()):
        right = {
            i
            for i, played in episodes.items()
            if any(word.lower() in (t["observation"] + "\n" + "".join(t["tokens"])).lower() for t in played)
        }
        page.fill("#search", word)
        expect(page.locator("#count")).to_have_text(re.compile(rf"^{len(right)} of "))
        assert set(listed(page)) == right
    page.fill("#search", "no such words")
    expect(page.locator("#count")).to_have_text(re.compile("^0 of "))


def test_iterations_and_filters_live_in_the_address(opened, run_page, episodes):
    page = opened(run_page)
    page.fill("#from", "4")
    page.fill("#to", "6")
    page.locator("#shows button", has_text="solved").click()
    right = {i for i, p in episodes.items() if p[0]["iteration"] <= 6 and p[-1]["iteration"] >= 4 and won(p)}
    assert set(listed(page)) == right
    page.select_option("#sort", "longest")  # back to the first page
    again = opened(run_page, "#" + page.url.partition("#")[2])
    assert again.input_value("#from") == "4"
    assert again.input_value("#sort") == "longest"
    assert again.locator("#shows button[aria-pressed=true]").inner_text().startswith("solved")
    assert set(listed(again)) == right


def test_an_address_with_other_words_shows_every_episode(opened, run_page, episodes):
    page = opened(run_page, "#show=toString&kind=constructor&sort=valueOf")
    assert sorted(listed(page)) == sorted(episodes)
    assert page.locator("#shows button[aria-pressed=true]").inner_text().startswith("all")


# An episode


def test_an_episode_opens_with_all_its_turns(opened, run_page, episodes):
    page = opened(run_page)
    played_id, played = max(episodes.items(), key=lambda item: len(item[1]))
    open_episode(page, played_id)
    assert page.locator(".turn").count() == len(played)
    for k in (0, len(played) - 1):
        card, turn = page.locator(".turn").nth(k), played[k]
        assert card.locator(".said").inner_text() == turn["observation"]
        assert card.locator(".t").count() == len(turn["tokens"])
        shown = card.locator(".reply").inner_text().replace("⏎", "")
        assert shown == "".join(turn["tokens"])
        facts = card.locator(".numbers").inner_text().replace("\n", " ")
        assert f"→ executed {turn['action']}" in facts
        card.locator("summary").click()
        assert card.locator("pre").inner_text() == turn["prompt"]
        assert f"{len(turn['prompt_ids'])} tokens" in card.locator("summary").inner_text()
    thoughts = page.locator(".turn").first.locator(".t:not(.acts)").count()
    assert thoughts == played[0]["thought_tokens"] > 0


def open_episode(page: Page, which: str) -> None:
    page.evaluate("id => { location.hash = 'episode=' + id; }", which)
    expect(page.locator("#bar h3")).to_have_text("env {}, episode {} ".format(*which.split(".")))


def colours(page: Page, turn: int) -> list[str]:
    script = "spans => spans.map((span) => getComputedStyle(span).backgroundColor)"
    return page.locator(".turn").nth(turn).locator(".t").evaluate_all(script)


def test_colours_follow_the_quantity_and_its_sign(opened, run_page, episodes):
    which, played = next((i, p) for i, p in episodes.items() if len(p) > 4)
    page = opened(run_page, f"#episode={which}")
    expect(page.locator(".turn").first).to_be_visible()
    seen = []
    for name, values in {
        "advantage": played[1]["advantages"],
        "KL to reference": minus(played[1]["old_logps"], played[1]["ref_logps"]),
        "log-prob gap": minus(played[1]["old_logps"], played[1]["rollout_logps"]),
    }.items():
        page.select_option("#colour", name)
        kinds = page.locator(".turn").nth(1).locator(".t").evaluate_all("all => all.map((span) => span.className)")
        for kind, x in zip(kinds, values, strict=True):
            if abs(x) > 1e-4:  # differences of rounded numbers
                assert ("pos" if x > 0 else "neg") in kind.split()
        seen.append(colours(page, 1))
        assert len(set(seen[-1])) > 5
    for name in ("value", "entropy", "log-prob"):
        page.select_option("#colour", name)
        assert page.locator(".turn").nth(1).locator(".t.seq").count() == len(played[1]["tokens"])
        seen.append(colours(page, 1))
    assert len({tuple(s) for s in seen}) == 6
    strengths = (
        page.locator(".turn")
        .nth(1)
        .locator(".t")
        .evaluate_all("all => all.map((s) => +s.style.getPropertyValue('--t'))")
    )
    logps = played[1]["rollout_logps"]
    assert strengths[logps.index(min(logps))] == max(strengths)  # the unlikely token stands out
    assert "colour=log-prob" in page.url


def minus(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("phone", [False, True])
def test_a_token_tells_its_numbers(opened, run_page, episodes, phone):
    which, played = next((i, p) for i, p in episodes.items() if len(p) > 2)
    page = opened(run_page, f"#episode={which}", phone=phone)
    turn, k = played[1], 6
    token = page.locator(".turn").nth(1).locator(".t").nth(k)
    if phone:
        token.tap()
    else:
        token.hover()
    readout = page.locator("#readout")
    expect(readout).to_be_visible()
    assert f"id {turn['reply_ids'][k]}, token {k + 1} of {len(turn['tokens'])}, thought" in readout.inner_text()
    assert json.dumps(turn["tokens"][k]) in readout.inner_text()
    numbers = dict(
        readout.locator("tr").evaluate_all("rows => rows.map((r) => [...r.cells].map((c) => c.textContent))")
    )
    right = {
        "advantage": turn["advantages"][k],
        "return": turn["returns"][k],
        "value": turn["values"][k],
        "entropy": turn["entropy"][k],
        "log-prob when sampled": turn["rollout_logps"][k],
        "log-prob before the update": turn["old_logps"][k],
        "log-prob of the reference": turn["ref_logps"][k],
        "KL to reference": turn["old_logps"][k] - turn["ref_logps"][k],
        "log-prob gap": turn["old_logps"][k] - turn["rollout_logps"][k],
    }
    assert set(numbers) == set(right)
    for name, x in right.items():
        assert math.isclose(number(numbers[name]), x, rel_tol=1e-4, abs_tol=1e-4), name
    box = readout.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.evaluate("innerWidth")
    if not phone:
        token.click()  # stays, and the arrow keys move it
        page.keyboard.press("ArrowRight")
        assert f"token {k + 2} of" in readout.inner_text()
        page.keyboard.press("Escape")
        expect(readout).to_be_hidden()


def test_keys_and_buttons_go_through_the_list_as_it_is_filtered(opened, run_page):
    page = opened(run_page, "#show=failed&sort=longest")
    ids = page.locator("#rows .row").evaluate_all("rows => rows.map((row) => row.dataset.id)")
    title = page.locator("#bar h3")
    names = ["env {}, episode {} ".format(*i.split(".")) for i in ids]
    page.keyboard.press("j")
    expect(title).to_have_text(names[0])
    expect(page.get_by_role("button", name="previous").last).to_be_disabled()
    page.keyboard.press("j")
    expect(title).to_have_text(names[1])
    page.locator("#bar .go").last.click()
    expect(title).to_have_text(names[2])
    page.keyboard.press("k")
    expect(title).to_have_text(names[1])
    assert page.locator("#rows .row[aria-current=true]").get_attribute("data-id") == ids[1]
    page.locator("#search").press("j")  # a letter for the search, no key
    expect(title).to_have_text(names[1])


def test_an_episode_beyond_the_first_page_of_the_list_is_found(opened, run_page):
    page = opened(run_page)
    page.locator("#pages button", has_text="next").click()
    which = page.locator("#rows .row").nth(3).get_attribute("data-id")
    again = opened(run_page, f"#episode={which}")
    expect(again.locator("#rows .row[aria-current=true]")).to_have_attribute("data-id", which)


# Curves and head


def test_the_page_opens_with_success_and_a_failure_to_read(opened, run_page):
    page = opened(run_page)
    expect(page.locator("#figures dt").first).to_have_text("held-out success before")
    expect(page.locator("#rows .row[aria-current=true]")).to_have_text(re.compile("failed"))
    expect(page.locator("#detail .turn").first).to_be_visible()
    assert page.evaluate("scrollY") == 0
    assert opened(run_page, phone=True).locator("#detail .turn").count() == 0


def test_curves_can_be_read(opened, run_page):
    page = opened(run_page)
    tile = page.locator(".tile[data-name='rollout/success']")
    plain = tile.locator("b").inner_text()
    box = tile.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, box["y"] + 5)
    expect(tile.locator(".where")).to_have_text("at iteration 1")
    first = number(tile.locator("b").inner_text())
    low, high = sorted(number(text) for text in tile.locator(".range span").all_inner_texts())
    assert low <= first <= high
    page.mouse.move(0, 0)
    expect(tile.locator(".where")).to_be_empty()
    expect(tile.locator("b")).to_have_text(plain)
    assert page.locator(".tile").count() == 13
    page.locator("#curves-more").click()
    expect(page.locator(".tile[data-name='time/collect_seconds']")).to_be_visible()
    assert page.locator(".tile").count() == 19


def test_a_curve_of_very_many_steps_is_drawn(opened, tmp_path):
    write_log(tmp_path, [make_turn()])
    points = "".join(f"{step},{step % 7}\n" for step in range(140_000))
    (tmp_path / "metrics.csv").write_text(f"step,rollout/success\n{points}")
    page = opened(build_page(tmp_path))
    assert page.locator(".tile .range").inner_text().split() == ["6", "0"]


def test_the_head_tells_the_run(opened, run_page):
    page = opened(run_page)
    text = page.locator("#head").inner_text()
    assert "goto / version_0" in text
    assert "32.0 %" in text
    assert "90.6 %" in text
    page.get_by_text("About this run").click()
    expect(page.locator(".run-facts")).to_contain_text("versions.torch")


# Held-out episodes, two runs, links and marks


def held_out(place: int, iteration: int, won: bool, **changes: Any) -> list[Turn]:
    """An episode of three turns, or of two if it was won, with pictures and without scores."""
    gone = {"values": None, "old_logps": None, "ref_logps": None, "entropy": None, "advantages": None, "returns": None}
    head = {"phase": "held_out", "iteration": iteration, "env": place, "image": RED_DOT, **gone, **changes}
    turns = [make_turn(turn=k, **head) for k in range(2 if won else 3)]
    end = {"terminated": won, "truncated": not won, "stop": "env_done" if won else "max_turns"}
    return [*turns[:-1], {**turns[-1], **end, "success": won, "episode_return": float(won)}]


def write_held_out(run: Path, solved: dict[int, list[bool]]) -> Path:
    """Held-out episodes by the iteration after which they were played, in the only version of a run."""
    played = [turn for k, wins in solved.items() for place, won in enumerate(wins) for turn in held_out(place, k, won)]
    folder = run / "lightning_logs" / "version_0" / "turns" / "held_out"
    folder.mkdir(parents=True)
    (folder / "rank0-000000.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in played))
    return run


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    one, other = write_run(folder / "one", random_turns(200)), write_run(folder / "other", random_turns(300, seed=1))
    config = other / "lightning_logs" / "version_0" / "config.yaml"
    config.write_text(config.read_text().replace("seed_everything: 0", "seed_everything: 1"))
    write_held_out(one, {0: [False, False], 2: [True, False]})
    write_held_out(other, {0: [False, True], 3: [True, True]})
    return one, other


def test_beyond_the_end_of_the_shorter_run_a_read_out_names_the_iteration_of_either(opened, tmp_path):
    runs = [tmp_path / "short", tmp_path / "long"]
    for run, iterations in zip(runs, (2, 4), strict=True):
        write_held_out(run, {0: [False]})
        rows = "".join(f"{k},{k - 1},{k / 10}\n" for k in range(1, iterations + 1))
        (run / "lightning_logs" / "version_0" / "metrics.csv").write_text(f"step,epoch,rollout/success\n{rows}")
    page = opened(build_page(runs[0], other=runs[1]))
    tile = page.locator(".tile[data-name='rollout/success']")
    plot = tile.locator("svg")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 5)
    expect(tile.locator("b")).to_have_text(["A 0.2", "B 0.4"])
    expect(tile.locator(".where")).to_have_text("at 2 / 4")
    assert plot.bounding_box() == box  # nothing moves below the mouse


def test_held_out_episodes_are_in_the_list_with_pictures(opened, two_runs):
    page = opened(build_page(two_runs[0]))
    page.select_option("#kind", "held-out")
    assert listed(page) == ["h1.2", "h0.2", "h1.0", "h0.0"]
    page.locator("#rows .row[data-id='h0.2']").click()
    expect(page.locator("#bar h3")).to_have_text("held-out seed 0, after iteration 2 ")
    assert page.locator(".turn img").count() == page.locator(".turn").count() == 2
    assert page.locator("#colour").input_value() == "log-prob"  # nothing else is known of them
    assert page.locator(".t.none").count() == 0
    page.evaluate("location.hash = 'episode=h1.0'")
    expect(page.locator(".about").first).to_contain_text("before training")


def test_a_link_leads_to_one_turn(opened, run_page, episodes):
    which, played = max(episodes.items(), key=lambda item: len(item[1]))
    page = opened(run_page, f"#episode={which}")
    address = page.locator(".turn .link").nth(len(played) - 1).get_attribute("href")
    again = opened(run_page, address)
    linked = again.locator(".turn.linked")
    expect(linked).to_have_attribute("data-turn", str(played[-1]["turn"]))
    expect(linked).to_be_in_viewport()
    again.locator(".turn .link").first.click()
    expect(again.locator(".turn.linked")).to_have_attribute("data-turn", str(played[0]["turn"]))
    again.keyboard.press("j")
    assert "turn=" not in again.url


def test_stars_and_notes_stay_and_can_be_saved(opened, run_page, episodes):
    page = opened(run_page)
    which = page.locator("#rows .row").nth(2).get_attribute("data-id")
    page.locator("#rows .row").nth(2).click()
    page.locator("#star").click()
    page.locator("#note").fill(f"look again {XSS}")
    page.reload()
    page.wait_for_function("localStorage.length > 0")  # a browser may bring it after a page that is loaded at once
    page.reload()
    expect(page.locator("#star")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#note")).to_have_value(f"look again {XSS}")
    page.locator("#shows button", has_text="★").click()
    assert listed(page) == [which]
    with page.expect_download() as download:
        page.locator("#marks").click()
    (saved,) = json.loads(Path(download.value.path()).read_text())
    last = episodes[which][-1]
    assert (saved["star"], saved["note"], saved["address"]) == (True, f"look again {XSS}", f"#episode={which}")
    assert saved["episodes"][0] == {
        "run": "goto / version_0",
        "held_out": False,
        "env": last["env"],
        "episode": last["episode"],
        "iteration": last["iteration"],
    }
    page.keyboard.press("Escape")
    page.locator("#note").fill("")
    page.locator("#star").click()
    expect(page.locator("#marks")).to_be_hidden()


def test_small_numbers_can_be_read(opened, tmp_path):
    write_log(tmp_path, [make_turn("a", old_logps=[-0.5], ref_logps=[-0.5 + 2.43e-5])])
    page = opened(build_page(tmp_path))
    cell = page.locator("#rows .row [data-name=KL]")
    expect(cell).to_have_text("−2.43·10⁻⁵")
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")  # nothing is cut off


def test_two_runs_stand_beside_each_other(opened, two_runs, tmp_path):
    page = opened(build_page(two_runs[0], tmp_path / "two.html", other=two_runs[1]))
    tile = page.locator(".tile[data-name='rollout/success']")
    assert [path.get_attribute("class") for path in tile.locator("path[class^=run]").all()] == ["run0", "run1"]
    assert re.fullmatch(r"A .+\nB .+", tile.locator(".top").inner_text().strip())
    # Equal iterations are a pair, and so are the last ones of both.
    assert listed(page) == ["h1.2", "h0.2", "h1.0", "h0.0"]
    assert page.locator("#rows .row span:nth-child(3)").all_inner_texts() == ["2 / 3", "2 / 3", "0", "0"]
    page.locator("#shows button", has_text="by B only").click()
    assert listed(page) == ["h1.2", "h1.0"]
    page.locator("#rows .row").first.click()
    expect(page.locator("#bar h3")).to_have_text("held-out seed 1 ")
    heads = page.locator(".pair > .turn h3").all_inner_texts()
    assert heads == ["A: turn 0", "B: turn 0", "A: turn 1", "B: turn 1", "A: turn 2"]
    left, right = (page.locator(".pair > article").nth(k).bounding_box() for k in (0, 1))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"] + 1
    about = page.locator(".about").all_inner_texts()
    assert [text.split(" · ")[0] for text in about] == ["A: one / version_0, failed", "B: other / version_0, solved"]
    assert "seed_everything" in page.locator("#facts").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_each_side_of_a_held_out_game_is_an_episode_of_its_own(opened, tmp_path):
    """In the list, in the address and with marks; and beside the same side of another run."""
    for name in ("one", "other"):
        folder = tmp_path / name / "turns" / "held_out"
        folder.mkdir(parents=True)
        sides = [turn for side in (0, 1) for turn in held_out(3, 0, won=side == 0, episode=side)]
        (folder / "rank0-000000.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in sides))
    page = opened(build_page(tmp_path / "one"))
    assert listed(page) == ["h3.0.1", "h3.0"]
    page.locator("#rows .row[data-id='h3.0.1']").click()
    page.reload()
    expect(page.locator("#bar h3")).to_have_text("held-out seed 3, episode 1, before training ")
    expect(page.locator("#bar .failed")).to_be_visible()
    two = opened(build_page(tmp_path / "one", other=tmp_path / "other"))
    assert listed(two) == ["h3.0.1", "h3.0"]
    assert two.locator("#rows .row span:first-child").all_inner_texts() == ["neither", "both"]


def test_two_runs_without_a_pair_are_shown_live(browser, two_runs, tmp_path):
    """There is no list yet, and the page goes on asking for news."""
    write_log(tmp_path, [make_turn()])
    with PageServer(two_runs[0], other=tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, errors = browser.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address)
        expect(page.locator("#live")).to_contain_text("live: shows what is new")
        assert (errors, page.locator("#bench").count()) == ([], 0)
        server.shutdown()
        page.close()


def test_a_live_page_shows_what_is_new(browser, tmp_path):
    """It says that it waits, then shows turns as they come; an open episode stays until the reader asks."""
    with PageServer(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(server.address)
        expect(page.locator("p")).to_contain_text("Nothing to show yet")
        write_log(tmp_path, [make_turn()])
        expect(page.locator("#rows .row")).to_have_count(1, timeout=20_000)
        write_log(tmp_path, [make_turn(), make_turn(env=1)])
        expect(page.locator("#rows .row")).to_have_count(2, timeout=20_000)
        page.locator("#rows .row").first.click()
        write_log(tmp_path, [make_turn(env=env) for env in range(3)])
        page.locator("#live button").click(timeout=20_000)
        expect(page.locator("#rows .row")).to_have_count(3)
        expect(page.locator(".turn")).to_have_count(1)  # the same episode is still open
        server.shutdown()
        page.close()


def test_marks_of_a_live_page_are_there_when_it_is_offered_again(browser, tmp_path):
    """Browsers keep them by the address, so it has to be the same."""
    write_log(tmp_path, [make_turn()])
    context, port = browser.new_context(), 0
    for starred in ("false", "true"):
        with PageServer(tmp_path, port=port) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page, port = context.new_page(), server.server_address[1]
            page.goto(server.address)
            page.locator("#rows .row").first.click()
            expect(page.locator("#star")).to_have_attribute("aria-pressed", starred)
            if starred == "false":
                page.locator("#star").click()
            server.shutdown()
            page.close()
    context.close()


# Phone


def test_a_phone_shows_one_thing_at_a_time(opened, run_page):
    page = opened(run_page, phone=True)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == 390
    page.locator("#curves > summary").tap()
    assert page.evaluate(width) == 390
    page.locator("#rows .row").nth(2).tap()
    expect(page.locator(".turn").first).to_be_visible()
    expect(page.locator("#list")).to_be_hidden()
    assert page.evaluate(width) == 390
    for target in page.locator("#bar button:visible").all():
        box = target.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 32
    page.locator("#bar .back").tap()
    expect(page.locator("#list")).to_be_visible()
    expect(page.locator("#detail")).to_be_hidden()
    assert "episode" not in page.url


# Odd logs


def test_hostile_text_stays_text(opened, tmp_path):
    odd = make_turn(
        f"{XSS} <|im_end|>", observation=XSS, prompt=XSS, parsed_action=XSS, action=XSS, thought=XSS, stop=XSS,
        terminated=True, env_errors=[XSS], metrics={XSS: 1.0}, image=RED_DOT,
    )  # fmt: skip
    run = tmp_path / "run"
    write_log(run, [odd, make_turn("go", turn=0, episode=1)])
    (run / "run.json").write_text(json.dumps({XSS: XSS}))
    (run / "config.yaml").write_text(XSS)
    page = opened(build_page(run))
    page.fill("#search", "</script>")
    expect(page.locator("#count")).to_have_text("1 of 2 episodes")
    page.locator("#rows .row").click()
    for summary in page.locator("summary:visible").all():
        summary.click()
    expect(page.locator(".said")).to_have_text(XSS)
    expect(page.locator("pre").last).to_have_text(XSS)
    page.locator(".t").nth(3).hover()
    assert page.locator("img").count() == 1  # the turn's own
    assert page.evaluate("window.hit") is None


def test_what_is_missing_is_said(opened, tmp_path):
    gone = {"values": None, "old_logps": None, "ref_logps": None, "entropy": None}
    played = [make_turn(turn=k, iteration=k, **gone) for k in (3, 4, 6)]
    write_log(tmp_path, [*played, make_turn(turn=0, iteration=6, env=1, success=True, terminated=True, **gone)])
    page = opened(build_page(tmp_path))
    page.locator("#rows .row[data-id='0.0']").click()
    notes = page.locator(".about .note").all_inner_texts()
    assert notes == [
        "Turns 0 to 2 of this episode are no longer in the log.",
        "Turn 5 of this episode is not in the log.",
    ]
    assert "still running" in page.locator(".about").inner_text()
    options = page.locator("#colour option").evaluate_all("all => all.map((o) => [o.textContent, o.disabled])")
    assert options == [
        ["advantage", False],
        ["value (no critic)", True],
        ["entropy (not scored)", True],
        ["KL to reference (no reference model)", True],
        ["log-prob gap (not scored)", True],
        ["log-prob", False],
    ]
    assert "neither TensorBoard events nor" in page.locator("#curves").inner_text()


def test_a_number_that_was_not_finite_has_no_colour(opened, tmp_path):
    odd = make_turn("a b c", advantages=[None, float("nan"), -1.0], old_logps=[-1.0, None, -1.0])
    write_log(tmp_path, [odd])
    page = opened(build_page(tmp_path), "#episode=0.0")
    expect(page.locator(".turn")).to_be_visible()
    kinds = "all => all.map((span) => [...span.classList].find((c) => ['pos', 'neg', 'none'].includes(c)))"
    assert page.locator(".t").evaluate_all(kinds) == ["none", "none", "neg"]
    assert "advantage: mean −1" in page.locator(".turn").inner_text()
    page.select_option("#colour", "KL to reference")
    assert page.locator(".t").evaluate_all(kinds) == ["neg", "none", "neg"]
    page.locator(".t").first.click()
    assert page.locator("#readout tr", has_text="advantage").inner_text().split() == ["advantage", "–"]


def test_nothing_in_a_reply_is_invisible(opened, tmp_path):
    tokens = ["\n", "\n\n", " ", "\t", "", "\x07", "a b", "<|im_end|>"]
    grown = {"continues": True, "prompt": "more", "prompt_ids": [1]}
    write_log(tmp_path, [make_turn("a b c d e f g h", tokens=tokens, image=RED_DOT, **grown)])
    page = opened(build_page(tmp_path), "#episode=0.0")
    expect(page.locator(".turn")).to_be_visible()
    shown = page.locator(".t").evaluate_all("all => all.map((span) => span.textContent)")
    assert shown == ["⏎\n", "⏎\n⏎\n", "␣", "⇥", "∅", "␇", "a b", "<|im_end|>"]
    assert page.locator(".t.special").count() == 1
    assert page.locator(".turn img").evaluate("image => image.naturalWidth") == 1
    title = "Added to the prompt, 1 token; the model also read the turns before"
    expect(page.locator(".turn summary")).to_have_text(title)


# Size


@pytest.mark.long
def test_of_ten_thousand_turns_only_what_is_seen_is_drawn(browser, tmp_path):
    """How long it takes is printed."""
    turns = random_turns(10_000, seed=5)
    path = build_page(write_run(tmp_path, turns))
    listed_after, open_after, page = seconds_to_open(browser, path)
    tokens = sum(len(turn["tokens"]) for turn in turns) / len(turns)
    characters = sum(len(turn["prompt"]) for turn in turns) / len(turns)
    print(f"\nlist after {listed_after:.2f} s, first episode open after {open_after:.2f} s")
    assert tokens >= 28
    assert characters >= 850
    assert page.locator("#rows .row").count() <= 100
    assert page.locator(".turn").count() <= 100
    page.fill("#search", turns[5000]["thought"].split()[-1])
    expect(page.locator("#count")).to_have_text(re.compile("of [0-9,]+ episodes"), timeout=5000)
    page.close()


def test_an_episode_with_forks_shows_what_they_returned(opened, tmp_path):
    turns = [make_turn(turn=0, branch_returns=[1.0, 0.5, None, 0.123456]), make_turn(turn=1, stop="env_done")]
    page = opened(build_page(write_run(tmp_path / "run", turns)))
    page.locator("#rows .row").first.click()
    expect(page.get_by_text("1, 0.5, –, 0.1235", exact=True)).to_be_visible()
