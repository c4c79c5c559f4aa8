"""The laboratory: paired runs of small models with exact values.

    make laboratory                                  # all cells, then docs/results/laboratory.md
    python -m benchmarks.laboratory --cell turns     # one cell
    python -m benchmarks.laboratory --report         # the page from the runs that are there
    python -m benchmarks.laboratory --first-seed 100 # again with other seeds; prints what came out

A run that is there is not made again, so this can be stopped at any time.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import warnings
from collections.abc import Set
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.laboratory.arms import play
from benchmarks.laboratory.cells import CELLS
from benchmarks.laboratory.cloning import cloned
from benchmarks.laboratory.measures import area, end
from benchmarks.laboratory.records import as_text, key, load, save
from benchmarks.laboratory.report import told, write

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "results" / "laboratory.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=CELLS, nargs="+", default=list(CELLS), help="cells to run; all by default")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page of the runs that are there")
    parser.add_argument("--first-seed", type=int, default=0, help="seeds begin here; the page has those from 0")
    parser.add_argument("--share", default="1/1", help="of the seeds, for several processes: 1/2 and 2/2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "laboratory", help="folder of runs and models")
    wanted = parser.parse_args()
    quiet()
    gc.freeze()  # modules stay for as long as the process; to look through them again and again takes time
    if not wanted.report:
        part, parts = map(int, wanted.share.split("/"))
        made = set(load(wanted.runs, RECORD, CELLS))
        for name in wanted.cell:
            seeds = range(wanted.first_seed, wanted.first_seed + CELLS[name].seeds)[part - 1 :: parts]
            run(name, wanted.runs, seeds, made)
    if wanted.first_seed:
        print(told(load(wanted.runs, None, CELLS, wanted.first_seed), wanted.first_seed))
    elif wanted.report:
        records = load(wanted.runs, RECORD, CELLS)
        save(RECORD, as_text(records))
        write(records, RECORD.with_suffix(".md"))


def quiet() -> None:
    """Say nothing of each of some hundred fits; and one thread, since more are slower with models this small."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)


def run(name: str, folder: Path, seeds: range, made: Set[str]) -> None:
    """Make the runs of a cell that neither the record nor the folder has, one seed of all arms after the other."""
    cell = CELLS[name]
    for seed in seeds:
        for arm, setting in cell.arms.items():
            path = folder / f"{key(cell, arm, seed)}.json"
            if path.stem in made or path.exists():
                continue
            model = cloned(cell.start, folder)
            done = play(cell.start, model, setting, cell.iterations, seed)
            save(path, json.dumps(done))
            print(
                f"{name}, {arm}, seed {seed}: success {done['curve'][0]:.2f} to {end(done):.2f}, area "
                f"{area(done):.3f}, {done['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
