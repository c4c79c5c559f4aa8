"""The page on which advice is judged, made from the record of its runs; no number in it is written by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.intervals import T_QUANTILES
from benchmarks.laboratory.markdown import table
from benchmarks.laboratory.measures import area_per_turn

Scores = Mapping[str, Sequence[float]]  # of one task by setting, paired by seed

HEAD = """\
# Advice on held-out tasks

Ten small tasks that were chosen before anything was trained on them, six settings of the recipe, at most {seeds} paired
seeds. Written by `python -m benchmarks.laboratory.judge --report` from `advise.json`. The tasks are those of
`benchmarks/laboratory/held_out.py`, the settings those of `benchmarks/laboratory/judge.py`.

## The advice

{advice}

{judged}

## How good the settings are

{scores}

A score is the mean held-out return over {played:,} sampled turns, those of a warm-up included, as a share of the way
from the start (0) to an expert without mistakes (1). **Bold** is the best mean, and settings *in italics* cannot be
told from it: the 95 % t interval of the paired differences includes 0. With {seeds} seeds such intervals are wide, so
the loss says more: how far a score is below the best of its task.

{losses}

## The tasks

{tasks}

*Success* and *return* are those of the start, a model of 0.02 million parameters cloned from an expert that often
errs, in the held-out episodes; *expert* is the return of that expert without mistakes; *turns* the mean length of the
start's episodes.

## How it is measured

Every setting begins with the same weights, and equal seeds have equal levels and draws. An iteration has 512 turns in
2 optimizer steps, or as many whole groups of 8 as come to about 512 turns at the start; learning rate 5e-4, no KL, no
entropy bonus, a separate critic whose head begins with zeros. After about every 1,024 turns 256 episodes with seeds
that training never sees are played at temperature 1, with the same draws every time.

* `short_cuts`: dual-discount GAE .99/.95 (1/1 within a turn), 8 turns of 64 environments
* `long_cuts`: the same, 64 turns of 8 environments
* `one_pair`: GAE .99/.95 for each token, 64 turns of 8 environments
* `groups`: GRPO in groups of 8 whole episodes
* `groups_by_state`: GiGPO (discount .99) in groups of 8 whole episodes
* `warm_up`: as `short_cuts`; the critic learns for 10 rounds from 1,024 turns before the actor moves
"""


@dataclass(frozen=True)
class Paired:
    """A mean of paired differences with its 95 % t interval."""

    value: float
    low: float
    high: float


def paired(better: Sequence[float], worse: Sequence[float]) -> Paired:
    """Return by how much one setting is better than another, over equal seeds."""
    differences = [a - b for a, b in zip(better, worse, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"an interval needs at least 2 pairs, got {len(differences)}")
    quantile = T_QUANTILES[min(len(differences) - 1, len(T_QUANTILES)) - 1]
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    return Paired(mean, mean - half, mean + half)


def scores_of(task: Mapping[str, Any], played: int) -> dict[str, list[float]]:
    """Return the score of each run of a task: the area per turn, from 0 at the start to 1 for the expert."""
    start, expert = task["start"]["return"], task["start"]["expert"]
    return {
        setting: [(area_per_turn(run, played) - start) / (expert - start) for run in runs]
        for setting, runs in task["runs"].items()
    }


def best_of(scores: Scores) -> str:
    """Return the setting with the best mean."""
    return max(scores, key=lambda setting: fmean(scores[setting]))


def loss(scores: Scores, setting: str) -> float:
    """Return how far the mean of a setting is below the best one."""
    return fmean(scores[best_of(scores)]) - fmean(scores[setting])


def like_best(scores: Scores, setting: str) -> bool:
    """Return whether a setting is the best one or cannot be told from it."""
    best = best_of(scores)
    return setting == best or paired(scores[best], scores[setting]).low <= 0


def shown(scores: Scores, setting: str) -> str:
    if setting not in scores:
        return "–"
    text = f"{fmean(scores[setting]):.3f}"
    return f"**{text}**" if setting == best_of(scores) else f"*{text}*" if like_best(scores, setting) else text


def score_rows(scores: Mapping[str, Scores], settings: Sequence[str]) -> list[list[str]]:
    found = []
    for task, of_task in scores.items():
        best, *others = sorted(of_task, key=lambda setting: -fmean(of_task[setting]))
        over = ""
        if others:
            gap = paired(of_task[best], of_task[others[0]])
            over = f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f}) over `{others[0]}`"
        found.append([task, *(shown(of_task, setting) for setting in settings), f"`{best}`", over])
    return found


def advice_rows(scores: Mapping[str, Scores], advice: Mapping[str, str]) -> list[list[str]]:
    found = []
    for task, of_task in scores.items():
        if task not in advice or advice[task] not in of_task:
            continue
        said, best = advice[task], best_of(of_task)
        gap = paired(of_task[best], of_task[said])
        verdict = "the best" if said == best else "like the best" if like_best(of_task, said) else "worse"
        behind = "" if said == best else f"{gap.value:.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
        found.append([task, f"`{said}`", f"`{best}`", behind, f"**{verdict}**"])
    return found


def choice_rows(scores: Mapping[str, Scores], settings: Sequence[str], advice: Mapping[str, str]) -> list[list[str]]:
    """Return for the advice, and for each setting as the choice of all tasks, how good the choice is."""
    choices = {f"always `{setting}`": dict.fromkeys(scores, setting) for setting in settings}
    if set(scores) <= set(advice):
        choices = {"the advice": dict(advice), **choices}
    return [
        [
            name,
            f"{fmean(fmean(of_task[choice[task]]) for task, of_task in scores.items()):.3f}",
            f"{fmean(loss(of_task, choice[task]) for task, of_task in scores.items()):.3f}",
            f"{max(loss(of_task, choice[task]) for task, of_task in scores.items()):.3f}",
            f"{sum(like_best(of_task, choice[task]) for task, of_task in scores.items())} of {len(scores)}",
        ]
        for name, choice in choices.items()
    ]


def page(record: Mapping[str, Any]) -> str:
    """Return the page; tasks of which runs are missing are left out of what compares whole tasks."""
    tasks = record["tasks"]
    scores = {name: of_task for name, task in tasks.items() if (of_task := scores_of(task, record["played"]))}
    settings = list(dict.fromkeys(setting for of_task in scores.values() for setting in of_task))
    whole = {name: of_task for name, of_task in scores.items() if len(of_task) == len(settings)}
    seeds = max((len(runs) for of_task in scores.values() for runs in of_task.values()), default=0)
    rows = advice_rows(whole, record["advice"])
    good = sum("worse" not in row[-1] for row in rows)
    return HEAD.format(
        seeds=seeds,
        played=record["played"],
        advice=table(rows, ["task", "advised", "best", "behind it", "the advice is"]) if rows else "None yet.",
        judged=f"It is the best or like it in {good} of {len(rows)} tasks." if rows else "",
        scores=table(score_rows(scores, settings), ["task", *(f"`{s}`" for s in settings), "best", "by"]),
        losses=table(
            choice_rows(whole, settings, record["advice"]) if whole else [],
            ["choice", "mean score", "mean loss", "largest loss", "the best or like it"],
        ),
        tasks=table(
            [
                [
                    name,
                    task["about"],
                    f"{task['start']['success']:.2f}",
                    f"{task['start']['return']:.2f}",
                    f"{task['start']['expert']:.2f}",
                    f"{task['start']['mean_turns']:.1f}",
                ]
                for name, task in tasks.items()
            ],
            ["task", "what it is", "success", "return", "expert", "turns"],
        ),
    )
