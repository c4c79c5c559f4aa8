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

Choices of the recipe on games whose values are known exactly, with models of 0.02 million parameters and paired seeds.
Written by `python -m benchmarks.laboratory --report` from `laboratory.json` and `every_estimator.json`; what is missing
there, `make laboratory` runs. What is compared, and what would refute it, was written down in
`benchmarks/laboratory/cells.py` before the runs.

Below the cells: what [every estimator](#every-estimator-learns) learns, and
[earlier runs](#the-published-ablations-repeated) with a model of 135 million parameters that could not show an effect.

## What came out

{table}

A difference is that of runs with equal seeds: interquartile mean with the 95 % interval of a bootstrap over pairs,
widened for so few of them. *confirmed* and *refuted* say that the interval excludes 0. Where it does not, the verdict
names the effect that would have been seen in four of five repetitions. One interval in twenty excludes 0 by chance
alone, and one of so few seeds may be too narrow.

{kept} of {cells} cells have been run{missing}.

## Again with other seeds

Where the interval of the first {half} seeds excluded 0, the same difference of the other seeds, which were run later.

{again}

{same} of {asked} have the same sign.

## How it is measured

* **Key and door**: three rows, a wall with a door, a key in the leftmost column and the goal in the rightmost one, four
  maps. Taking the shortest way takes as many turns as the *horizon*; twice as many truncate. The goal pays 1. A prompt
  tells the whole state (`x3 y1 none k0 g2`). With a *lure* a cell beside the door, off the way, pays less and ends the
  episode; with *slip* an action is now and then a random one.
* **T-maze**, in the cells about the past: a sign at the start of a corridor tells a side, which has to be taken at the
  junction at its end, where nothing tells it. The right side pays its share of 1 and leads into the next corridor, the
  wrong one ends the episode. Before a junction there is one thing to do, so actions tell nothing of the sign.
  A window that is longer than the delay shows the end of the corridor before as well. *Actions only* are a line of
  the last actions without observations; a *cleared* history grows turn by turn, without thoughts, and is emptied at
  intervals.
* **Replies** have a fixed number of words: thoughts of four letters each, then the action. In T-maze the thought is a
  side.
* **Exact success**: after every iteration the policy is read in all states and its success within the limit of turns is
  computed. With replies of several words the chances of the action are averaged over six sampled thoughts a state, the
  same draws in every run, which is all the noise there is. In T-maze all replies are gone through in every history that
  can come before a turn, the thoughts in it included, so there is none.
* **Area** is the mean success over the iterations, the start not included; *area per turn* the mean over equally many
  turns; *dip* the worst success less that of the start.
* **Start**: a Llama of two layers and 32 dimensions, cloned once per cell from 8,192 turns of an expert that
  draws more than half of its moves at random. All arms and seeds begin with the same weights; arms of equal seed have
  equal levels and draws. The expert of T-maze thinks of the side of the sign, and of a random one from a turn on in
  which it is confused; its prompts show 1 to 8 past turns, in the cell about forgetting also actions only and cleared
  histories, so that all arms can read theirs.
* **Training**: `PPOAgent` with 512 turns an iteration in 2 optimizer steps, learning rate 5e-4 for policy and a
  separate critic, dual-discount GAE .99/.95 (1/1 within a turn), no KL, no entropy bonus, 8 turns of 64 environments,
  a value head of zeros, prompts without past turns, unless an arm says otherwise. Environments begin their first
  episodes together, so with short cuts the first iterations see no end of an episode.
"""
# Of runs whose records are kept in the history only, so the numbers stand here.
ABLATIONS = """
## The published ablations, repeated

Before there was a laboratory, six choices of the published recipe were each taken back alone: the demo model with 135
million parameters, `agentrl_envs:BabyAIText-GoToObjS6-v0`, 6 iterations of 128 turns, three seeds, 64 held-out episodes
before and after; 21 runs with those of the base, whose success rose from 0.318 to 0.823. From the base's, success after
training differed by -1.6 points (95 % interval -14.6 to +11.5) with a single discount in place of the dual one, by +5.7
(-14.3 to +25.8) without critic warm-up, whose two iterations went to the actor, by -3.1 (-14.8 to +8.6) with a KL of
weight 1e-9 in place of 0.001, by -2.6 (-17.9 to +12.7) with a weight of 1 in place of 3 for the first token, by -4.2
(-35.3 to +27.0) with a separate critic in place of a shared one, and by +0.5 (-33.2 to +34.2) with 8 environments of 16
turns in place of 32 of 4. None of these intervals excluded 0, nor did any of the area under the reward per turn. They
reached 12 to 34 points to each side, so a smaller effect could not be seen, whether it is there or not: the runs speak
neither for nor against the recipe. That cell was too small for what is claimed. In replies of two or three tokens a
discount per token differs from one per turn by that factor only; six iterations leave a policy little time to drift; a
value head that begins with zeros has no noise that a warm-up could keep from the actor; and an episode of at most
twelve turns is over within a few cuts. So the cells above were made, in which an effect would show where the reason
that is given for it holds. The page of these runs: `git show 47539c3bbd60:docs/results/ablations.md`, and
`ablations.json` beside it.
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
                f"{min(measures.dip(run) for run in of_arm):+.3f}",
                f"{len(reached)} of {len(of_arm)}" + (f", at {statistics.median(reached):g}" if reached else ""),
                f"{statistics.fmean(run['turns'][-1] for run in of_arm):,.0f}",
                f"{statistics.median(run['seconds'] for run in of_arm):.0f}",
            ]
        )
    return found


def section(name: str, cell: Cell, runs: Mapping[str, Sequence[Run]]) -> str:
    of_one = next(iter(runs.values()))
    first, seeds = of_one[0]["curve"][0], len(of_one)
    arms = table(
        arm_rows(runs), ["arm", "area", "success at the end", "worst dip", f"reached {GOAL}", "turns", "seconds"]
    )
    return f"""
## {cell.title}

* **Claim**: {cell.claim}
* **By**: {cell.by}.
* **Refuted by**: {cell.refuted}.
* **Cell** `{name}`: {cell.start.about}; {cell.iterations} iterations, {seeds} seeds. Success of the start: {first:.2f}
  (of its expert: {cell.start.expert_success:.2f}).

{table(compared(cell, runs), ["claimed", "by", "difference", "verdict"])}

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
    return table(summary(complete(records, first_seed)), ["cell", "claimed", "by", "difference", "verdict"])


def page(records: Records, learned: Records) -> str:
    """Return the page of the runs of cells, and of those in which every estimator learned."""
    done = complete(records)
    missing = [f"`{name}`" for name in CELLS if name not in done]
    again = repeated(done)
    text = HEAD.format(
        table=told(records, 0),
        half=max(cell.seeds for cell in CELLS.values()) // 2,
        again=table(again, ["cell", "claimed", "by", "first seeds", "other seeds", "same sign"]),
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
