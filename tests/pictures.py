"""Pictures of what a person sees of a run: the page of `agentrl view`, and TensorBoard with its readable episodes.

    .venv/bin/python -m tests.pictures runs/quickstart docs/assets

The same code serves the screenshot test and the pictures in the docs. Those of held-out episodes and of two runs are
taken by `PICTURES=docs/assets make test-browser`.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from lightning_agentrl.tools.view import build_page


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of this system, headless.

    Raises:
        RuntimeError: when there is none.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise RuntimeError("there is no chromium on the PATH; install it with `make chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def picture_of_view(browser: Browser, run: Path, out: Path, show: str = "all") -> Page:
    """The page of a run with its longest episode of a kind open; the page stays open for further looks."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(build_page(run).resolve().as_uri())
    page.wait_for_load_state("load")
    page.locator(f"[data-show={show}]").click()
    page.locator("#sort").select_option("longest")
    page.locator(".row[data-id]").first.click()
    page.locator("[data-turn] [data-i]").first.wait_for()
    page.screenshot(path=str(out))
    return page


def picture_of_held_out(browser: Browser, run: Path, out: Path) -> Page:
    """The page of a run with the held-out episode of the most turns open that it played last."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(build_page(run).resolve().as_uri())
    page.locator("#kind").select_option("held-out")
    iterations = page.locator(".row[data-id]").evaluate_all("rows => rows.map((row) => row.dataset.id.split('.')[1])")
    page.locator("#from").fill(max(iterations, key=int))
    page.locator("#sort").select_option("longest")
    page.locator(".row[data-id]").first.click()
    page.locator("[data-turn] img").first.wait_for()
    page.locator("#bench").scroll_into_view_if_needed()
    page.screenshot(path=str(out))
    return page


def picture_of_two(browser: Browser, run: Path, other: Path, out: Path) -> Page:
    """Two runs beside each other, with the first pair of held-out episodes in the list open."""
    page = browser.new_page(viewport={"width": 1280, "height": 1300})
    page.goto(build_page(run, other=other).resolve().as_uri())
    page.locator(".row[data-id]").first.click()
    page.locator(".pair [data-turn]").first.wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=str(out))
    return page


def seconds_to_open(browser: Browser, path: Path) -> tuple[float, float, Page]:
    """Seconds until the list of a page is drawn, and until its second episode is open; the page stays open.

    The page notes the first by itself, since calls from here take time.
    """
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(
        """new MutationObserver((_, observer) => {
            if (!document.querySelector("#rows .row")) return;
            observer.disconnect();
            requestAnimationFrame(() => setTimeout(() => { window.listAfter = performance.now() }));
        }).observe(document, { childList: true, subtree: true });"""
    )
    page.goto(path.resolve().as_uri(), wait_until="load")
    page.locator("#rows .row").nth(1).click()
    page.locator(".turn").first.wait_for()
    listed, opened = page.evaluate("[window.listAfter, performance.now()]")
    return listed / 1000, opened / 1000, page


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """TensorBoard on the loopback; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/data/runs", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def picture_of_tensorboard(browser: Browser, address: str, tab: str, ready: str, out: Path) -> Page:
    """One tab of TensorBoard, once an element that matches ``ready`` is there."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/#{tab}")
    page.locator(ready).first.wait_for(timeout=120_000)
    page.wait_for_timeout(3000)  # its cards draw one after the other
    page.screenshot(path=str(out))
    return page


def main(run: str, folder: str) -> None:
    out = Path(folder)
    with chromium() as browser:
        picture_of_view(browser, Path(run), out / "view.png", show="solved")
        with tensorboard(Path(run)) as address:
            picture_of_tensorboard(browser, address, "text", "tf-text-loader", out / "tensorboard_text.png")
            picture_of_tensorboard(browser, address, "timeseries", "card-view", out / "tensorboard.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
