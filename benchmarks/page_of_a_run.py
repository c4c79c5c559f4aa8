"""How long the page of a run takes to be made and to open, by its number of turns.

    .venv/bin/python benchmarks/page_of_a_run.py 10000

The turns are made up: 12 environments, replies of some 30 tokens, prompts of some 900 characters. Needs Chromium
(`make chromium`). Each page is opened five times, and the median is printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_agentrl.view import build_page
from tests.pictures import chromium, seconds_to_open
from tests.view.logs import random_turns, write_run

TIMES = 5


def main(counts: list[int]) -> None:
    """Print one line for each number of turns."""
    for count in counts:
        with TemporaryDirectory() as folder, chromium() as browser:
            turns = random_turns(count, seed=5)
            run = write_run(Path(folder), turns)
            began = time.monotonic()
            path = build_page(run)
            made = time.monotonic() - began
            opened = []
            for _ in range(TIMES):
                *seconds, page = seconds_to_open(browser, path)
                opened.append(seconds)
                page.close()
            listed, episode = (statistics.median(times) for times in zip(*opened, strict=True))
            size = f"{len(turns)} turns, {path.stat().st_size / 1e6:.1f} MB: made in {made:.1f} s"
            print(f"{size}, list after {listed:.2f} s, an episode open after {episode:.2f} s", flush=True)


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]] or [10_000])
