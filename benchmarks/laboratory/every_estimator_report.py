"""The part of the page about what every estimator learns, made from the records of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.laboratory.every_estimator import (
    BANDIT,
    GOAL,
    GROUP_SIZES,
    ITERATIONS,
    LEARNING_RATE,
    MINI_BATCHES,
    RECENT,
    SEEDS,
    TWO_ROOMS,
    UPDATE_EPOCHS,
    Task,
    estimators,
    in_groups,
    key,
)
from benchmarks.laboratory.markdown import table
from benchmarks.laboratory.measures import Run
from benchmarks.laboratory.records import Records

TASKS = (BANDIT, TWO_ROOMS)
SECTION = """
## Every estimator learns

The table shows how many iterations each of {seeds} seeds needed (at most {iterations}) until the mean reward of
{recent} iterations reached {goal} of the best possible reward, and the median seconds of a run on one busy core. It
does not rank estimators: nothing was tuned, and {seeds} seeds are too few for small differences.

{table}

![iterations until each estimator had learned](laboratory_every_estimator.png)

* **{bandit}**: an episode has one turn, and the word in the observation determines which of three words pays 1. A reply
  is one of nine tokens: three words of observations, three that can pay, and three special tokens. So a random token
  pays in one of nine cases. The first iteration has a mean reward of at most {first:.2f}.
* **{rooms}**: an episode has up to 12 turns. The player walks from a cell of the western room through the door to a
  cell of the eastern room, which pays 1. The first iteration has a mean reward of at most {first_rooms:.2f}.
* **Settings**: a random Llama of two layers, PPO's clipped loss, no KL, entropy bonus 0.01, learning rate {rate:g} for
  policy and critic, {epochs} passes of {mini_batches} optimizer steps over an iteration. With groups of four episodes,
  an iteration has {bandit_episodes} episodes in the bandit and {rooms_episodes} in two rooms. Without groups it has
  {bandit_turns} and {rooms_turns} turns.
* **Exceptions**: PassAtK uses groups of {pass_size}, since it learns only from groups with a single best episode. GAE
  uses `gamma: 0.95` and `lam: 0.95`: with 1, waiting costs nothing, because the value after a time limit is
  bootstrapped.

`tests/agents/test_every_estimator_learns.py` repeats one seed.
"""


def runs_of(name: str, task: Task, records: Records) -> list[Run]:
    return [records[each] for seed in SEEDS if (each := key(name, task, seed)) in records]


def told(runs: Sequence[Run]) -> list[str]:
    """Return the iterations of each seed and the median seconds."""
    if not runs:
        return ["", ""]
    learned = [str(run["learned"]) if run["learned"] else f"not (ended at {run['curve'][-1]:.2f})" for run in runs]
    return [", ".join(learned), f"{statistics.median(run['seconds'] for run in runs):.1f}"]


def first_reward(task: Task, records: Records) -> float:
    """Return the highest of all runs."""
    return max((run["curve"][0] for name in estimators() for run in runs_of(name, task, records)), default=0)


def section(records: Records) -> str:
    rows = [
        [f"`{name}`", "groups" if in_groups(cls) else "turns"]
        + [cell for task in TASKS for cell in told(runs_of(name, task, records))]
        for name, cls in estimators().items()
    ]
    return SECTION.format(
        recent=RECENT,
        goal=GOAL,
        iterations=ITERATIONS,
        seeds=len(SEEDS),
        table=table(rows, ["estimator", "data", *(cell for task in TASKS for cell in (task.name, "seconds"))]),
        bandit=BANDIT.name,
        rooms=TWO_ROOMS.name,
        first=first_reward(BANDIT, records),
        first_rooms=first_reward(TWO_ROOMS, records),
        rate=LEARNING_RATE,
        epochs=UPDATE_EPOCHS,
        mini_batches=MINI_BATCHES,
        bandit_episodes=BANDIT.episodes,
        rooms_episodes=TWO_ROOMS.episodes,
        bandit_turns=BANDIT.num_envs * BANDIT.turns_per_env,
        rooms_turns=TWO_ROOMS.num_envs * TWO_ROOMS.turns_per_env,
        pass_size=next(iter(GROUP_SIZES.values())),
    )


def draw(records: Records, path: Path) -> None:
    """Draw a dot for each run, the seeds of an estimator one below the other; hollow at the limit: not learned."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.6), layout="constrained")
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for task, colour, marker in zip(TASKS, colours, "os", strict=False):
        dots = [
            (run["learned"] or ITERATIONS, row + 0.2 * (place - 1), bool(run["learned"]))
            for row, name in enumerate(estimators())
            for place, run in enumerate(runs_of(name, task, records))
        ]
        iterations, rows, learned = zip(*dots, strict=True) if dots else ((), (), ())
        filled = [colour if x else "none" for x in learned]
        axes.scatter(iterations, rows, 18, marker=marker, facecolors=filled, edgecolors=colour, label=task.name)
    axes.set_yticks(range(len(estimators())), list(estimators()), fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.3)
    axes.set(xlabel="iterations", xlim=(0, None), title=f"Iterations until {GOAL:g} of the best possible reward")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=80)
    plt.close(figure)
