"""The laboratory: paired runs of small models with exact values.

    make laboratory                                  # all cells and estimators, then docs/results/laboratory.md
    python -m benchmarks.laboratory --cell turns     # one cell; every_estimator is what each estimator learns
    python -m benchmarks.laboratory --report         # the page from the runs that are there
    python -m benchmarks.laboratory --first-seed 100 # again with other seeds; prints what came out

A run that is there is not made again, so this can be stopped at any time.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Set
from pathlib import Path

from benchmarks.laboratory import every_estimator
from benchmarks.laboratory.arms import play
from benchmarks.laboratory.cells import CELLS
from benchmarks.laboratory.cloning import cloned
from benchmarks.laboratory.fits import quiet
from benchmarks.laboratory.measures import area, end
from benchmarks.laboratory.records import as_text, key, keys_of, load, save, share
from benchmarks.laboratory.report import told, write

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "results" / "laboratory.json"
ESTIMATORS = "every_estimator"  # beside the names of cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CELLS, ESTIMATORS]
    parser.add_argument("--cell", choices=names, nargs="+", default=names, help="cells to run; all by default")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page of the runs that are there")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seeds of cells begin here; the page has those from 0"
    )
    parser.add_argument("--share", type=share, default="1/1", help="of the seeds, for several processes: 1/2 and 2/2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "laboratory", help="folder of runs and models")
    wanted = parser.parse_args()
    quiet()
    gc.freeze()  # modules stay for as long as the process; to look through them again and again takes time
    if not wanted.report:
        part, parts = wanted.share
        made = load(wanted.runs, RECORD, keys_of(CELLS.values())).keys()
        for name in wanted.cell:
            if name in CELLS:
                seeds = range(wanted.first_seed, wanted.first_seed + CELLS[name].seeds)[part - 1 :: parts]
                run(name, wanted.runs, seeds, made)
            else:
                every_estimator.run(wanted.runs, part, parts)
    if wanted.first_seed:
        print(told(load(wanted.runs, None, keys_of(CELLS.values(), wanted.first_seed)), wanted.first_seed))
    elif wanted.report:
        records = load(wanted.runs, RECORD, keys_of(CELLS.values()))
        learned = every_estimator.kept(wanted.runs)
        save(RECORD, as_text(records))
        save(every_estimator.RECORD, as_text(learned))
        write(records, learned, RECORD.with_suffix(".md"))


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
