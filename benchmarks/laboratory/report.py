"""The page of the laboratory, made from the records of its runs; no number or verdict of them is written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from benchmarks.laboratory import every_estimator_report, measures
from benchmarks.laboratory.cells import CELLS, Cell, Comparison
from benchmarks.laboratory.markdown import table
from benchmarks.laboratory.measures import GOAL, Estimate, Run
from benchmarks.laboratory.records import Records, runs_of, save

HEAD = """\
# Laboratory

See which choices of the published recipe helped in games whose exact values can be computed: models of 0.02 million
parameters, paired seeds, November 2026. Each claim, and the result that would refute it, was written in
`benchmarks/laboratory/cells.py` before the runs. The page is generated from `laboratory.json` and
`every_estimator.json`. [How it is measured](#how-it-is-measured) defines the terms.

```bash
make laboratory                            # the missing runs, then the page
python -m benchmarks.laboratory --report   # the page alone
```

## What came out

{table}

Runs with equal seeds make a pair. The difference is the interquartile mean over pairs, with the 95 % interval of a
bootstrap, widened because of the few seeds. *Confirmed* and *refuted* mean that the interval excludes 0. Otherwise the
verdict names the effect that four of five repetitions would have shown. One interval in twenty excludes 0 by chance.

{kept} of {cells} cells have been run{missing}.

## Again with other seeds

If the interval of the first {half} seeds excludes 0, the table also shows the difference of the later, other seeds.

{again}

In {same} of {asked} rows, both differences have the same sign.

## How it is measured

* A **cell** is one experiment; its **arms** are the settings that it compares. Arms with equal seeds play the same
  levels with the same random numbers.
* **Key and door** is a map of three rows with a wall and a door. The key is in the leftmost column, the goal in the
  rightmost one; there are four maps. The shortest way takes *horizon* turns, and an episode is truncated after twice as
  many. The goal pays 1, and prompts describe the whole state. A *lure* beside the door pays less and ends the episode.
* **T-maze** is used in the cells about the past. A sign at the start of a corridor shows the side to take at the
  junction at its end. The right side pays an equal share of 1 and leads into the next corridor; the wrong side ends the
  episode. In the arm *actions only*, prompts show past actions without observations. A *cleared* history grows turn by
  turn and is emptied at intervals.
* **Replies** have a fixed number of words: thoughts (one of four letters; in T-maze the side), then the action.
* **Exact success**: after every iteration the policy's success is computed over all states, with six sampled thoughts
  for each state, which are the same in every run. In T-maze all replies and histories are enumerated.
* **Measures**: *area* is the mean success over the iterations after the start, and *area per turn* the mean over an
  equal number of turns. *Dip* is the lowest success minus the success at the start.
* **Start**: a Llama of two layers and 32 dimensions, cloned once per cell from 8,192 turns of an expert. The expert
  draws more than half of its moves at random; in T-maze it may get confused and then thinks of a random side.
* **Training**: `PPOAgent` trains on 512 turns an iteration (64 environments with 8 turns each) in 2 optimizer steps,
  with a learning rate of 5e-4 for the policy and for a separate critic, whose value head starts at zero. It uses
  dual-discount GAE .99/.95 (1/1 within a turn), no KL and no entropy bonus; prompts show no past turns. Arms change
  some of these settings: *cut at 2 turns* means 2 turns of each environment in an iteration, and a *random head* is a
  value head that starts with random values.
"""
# Of runs whose records are kept in the history only, so the numbers stand here.
ABLATIONS = """
## The published ablations, repeated

Each row reverts one choice of the published recipe: the demo model, `agentrl_envs:BabyAIText-GoToObjS6-v0`, 6
iterations of 128 turns, three seeds, 64 held-out episodes. With all choices, success rose from 0.318 to 0.823.

| reverted choice | change of success after training, in points (95 % interval) |
|---|---|
| single discount in place of the dual one | -1.6 (-14.6 to +11.5) |
| no critic warm-up, its two iterations for the actor | +5.7 (-14.3 to +25.8) |
| KL of weight 1e-9 in place of 0.001 | -3.1 (-14.8 to +8.6) |
| weight of 1 in place of 3 for the first token | -2.6 (-17.9 to +12.7) |
| separate critic in place of a shared one | -4.2 (-35.3 to +27.0) |
| 8 environments of 16 turns in place of 32 of 4 | +0.5 (-33.2 to +34.2) |

No interval excludes 0, and each reaches at least 12 points to both sides of its center. These runs were too small for a
conclusion, so the cells above were made. Records: `git show 47539c3bbd60:docs/results/ablations.json`.
"""


def interval(x: Estimate) -> str:
    return f"{x.value:+.3f} ({x.low:+.3f} to {x.high:+.3f})"


def differences(cell: Cell, runs: Mapping[str, Sequence[Run]]) -> list[tuple[Comparison, Estimate]]:
    """Return the paired difference of each comparison of a cell."""
    found = []
    for each in cell.comparisons:
        values = measures.measured(runs, each.measure)
        pairs = zip(values[each.better], values[each.worse], strict=True)
        found.append((each, measures.estimate([a - b for a, b in pairs])))
    return found


def compared(cell: Cell, runs: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    return [
        [
            f"{each.better} over {each.worse}",
            each.measure.replace("_", " "),
            interval(difference),
            f"**{measures.verdict(difference)}**",
        ]
        for each, difference in differences(cell, runs)
    ]


def arm_rows(runs: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    found = []
    for arm, of_arm in runs.items():
        reached = [k for run in of_arm if (k := measures.first_at_goal(run)) is not None]
        numbers = [measures.estimate([measure(run) for run in of_arm]) for measure in (measures.area, measures.end)]
        found.append(
            [
                arm,
                *(f"{x.value:.3f} ({x.low:.3f} to {x.high:.3f})" for x in numbers),
                f"{len(reached)} of {len(of_arm)}" + (f", at {statistics.median(reached):g}" if reached else ""),
            ]
        )
    return found


def section(name: str, cell: Cell, runs: Mapping[str, Sequence[Run]]) -> str:
    of_one = next(iter(runs.values()))
    first, seeds = of_one[0]["curve"][0], len(of_one)
    arms = table(arm_rows(runs), ["arm", "area", "success at the end", f"reached {GOAL}"])
    return f"""
## {cell.title}

* **Claim**: {cell.claim}
* **By**: {cell.by}.
* **Refuted by**: {cell.refuted}.
* **Cell** `{name}`: {cell.start.about}; {cell.iterations} iterations, {seeds} seeds. Success at the start: {first:.2f}
  (of the expert: {cell.start.expert_success:.2f}).

{arms}

![success over iterations](laboratory_{name}.png)
"""


def summary(done: Mapping[str, Mapping[str, Sequence[Run]]]) -> list[list[str]]:
    return [[CELLS[name].title, *row] for name, runs in done.items() for row in compared(CELLS[name], runs)]


def complete(records: Records, first_seed: int = 0) -> dict[str, dict[str, list[Run]]]:
    """Return the runs of the cells that have at least half of theirs."""
    found = {name: runs_of(cell, records, first_seed) for name, cell in CELLS.items()}
    return {name: runs for name, runs in found.items() if runs is not None}


def repeated(done: Mapping[str, Mapping[str, Sequence[Run]]]) -> list[list[str]]:
    """Return a row for each difference that the first half of the seeds showed, with that of the other half."""
    found = []
    for name, runs in done.items():
        half = CELLS[name].seeds // 2
        first = differences(CELLS[name], {arm: of_arm[:half] for arm, of_arm in runs.items()})
        if len(next(iter(runs.values()))) < half + 2:
            continue
        other = differences(CELLS[name], {arm: of_arm[half:] for arm, of_arm in runs.items()})
        found += [
            [
                CELLS[name].title,
                f"{each.better} over {each.worse}",
                each.measure.replace("_", " "),
                interval(before),
                interval(after),
                "yes" if before.value * after.value > 0 else "**no**",
            ]
            for (each, before), (_, after) in zip(first, other, strict=True)
            if measures.shown(before)
        ]
    return found


def told(records: Records, first_seed: int) -> str:
    """Return the table of all comparisons."""
    return table(summary(complete(records, first_seed)), ["cell", "claim", "measure", "difference", "verdict"])


def page(records: Records, learned: Records) -> str:
    """Return the page of the runs of cells, and of those in which every estimator learned."""
    done = complete(records)
    missing = [f"`{name}`" for name in CELLS if name not in done]
    again = repeated(done)
    text = HEAD.format(
        table=told(records, 0),
        half=max(cell.seeds for cell in CELLS.values()) // 2,
        again=table(again, ["cell", "claim", "measure", "first seeds", "other seeds", "same sign"]),
        same=sum(row[-1] == "yes" for row in again),
        asked=len(again),
        kept=len(done),
        cells=len(CELLS),
        missing=f"; these have not been run:\n{', '.join(missing)}" if missing else "",
    )
    cells = "".join(section(name, CELLS[name], runs) for name, runs in done.items())
    return text + cells + every_estimator_report.section(learned) + ABLATIONS


def write(records: Records, learned: Records, path: Path) -> None:
    """Write the page and its pictures."""
    save(path, page(records, learned))
    every_estimator_report.draw(learned, path.with_name("laboratory_every_estimator.png"))
    for name, runs in complete(records).items():
        draw(CELLS[name], runs, path.with_name(f"laboratory_{name}.png"))


def draw(cell: Cell, runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw the curves of all runs, thin, and their interquartile mean, thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    per_turn = any(each.measure == "area_per_turn" for each in cell.comparisons)
    colours = cycle(plt.rcParams["axes.prop_cycle"].by_key()["color"])
    for colour, (arm, of_arm) in zip(colours, runs.items(), strict=False):
        turns = np.array([run["turns"] for run in of_arm])
        curves = np.array([run["curve"] for run in of_arm])
        places = turns if per_turn else np.broadcast_to(np.arange(curves.shape[1]), curves.shape)
        axes.plot(places.T, curves.T, color=colour, alpha=0.25, linewidth=0.6)
        axes.plot(places.mean(0), measures.quartile_mean(curves.T), color=colour, linewidth=2, label=arm)
    axes.axhline(GOAL, color="grey", linewidth=0.6, linestyle=":")
    axes.set(xlabel="turns" if per_turn else "iteration", ylabel="exact success", ylim=(0, 1.02), title=cell.title)
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")  # beside the curves, which end anywhere
    figure.savefig(path, dpi=80)
    plt.close(figure)
