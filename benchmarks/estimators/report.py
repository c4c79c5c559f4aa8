"""The page of the estimators, made from their records; numbers are never written by hand."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimators.learn import (
    BANDIT,
    GOAL,
    GROUP_SIZES,
    ITERATIONS,
    LEARNING_RATE,
    MINI_BATCHES,
    RECENT,
    TWO_ROOMS,
    UPDATE_EPOCHS,
    Task,
    estimators,
    in_groups,
)

SEEDS = (0, 1, 2)
IN_ROOMS = ("GAE", "DualDiscountGAE", "GRPO", "OptimalTokenBaseline")
HEAD = """\
# Estimators that train

What each advantage estimator learns on small tasks, and how noisy the gradients of some are. Written by `make table`
from `estimators.json`; a run that is there is not made again.

## Every estimator learns

Iterations until the mean reward of {recent} iterations reached {goal} of the best possible, of at most {iterations},
for each of {seeds} seeds, and the median seconds of a run on one core of a machine that did other work too.

{learned}

* **{bandit}**: one turn; the word in the observation says which of three words pays 1. Replies of one token,
  from a vocabulary of these six words and three marks, so a random word pays in one of nine cases. The first iteration
  has a mean reward of at most {first:.2f}.
* **{rooms}**: up to 12 turns; from a cell of the western room through the door to a cell of the eastern one, which
  pays 1, and nothing else does. The first iteration has a mean reward of at most {first_rooms:.2f}.
* **One recipe**: a random Llama of two layers, PPO's clipped loss, no KL, entropy bonus 0.01, learning rate {rate:g}
  for policy and critic, {epochs} passes of {mini_batches} optimizer steps over an iteration. An iteration has groups of
  four, in all {bandit_episodes} episodes (bandit) or {rooms_episodes} (two rooms); without groups it has {bandit_turns}
  turns or {rooms_turns}.
* **Two differ**: PassAtK has groups of {pass_size}, since only a group with a single best episode teaches it anything;
  GAE has `gamma: 0.95` and `lam: 0.95`, since with 1 waiting costs nothing where the value after a time limit is
  bootstrapped.

This says that an estimator works, not which one is better: nothing was tuned for any of them, and three seeds tell no
small differences. `tests/agents/test_every_estimator_learns.py` repeats one seed.
"""
NOISE = """
## Noise of the gradient

The variance of the policy gradients that estimators make of the same rollouts: trace of the covariance over the squared
norm of the mean, with the 95 % interval of a bootstrap over rollouts.

{table}

{reading}

{rollouts} independent rollouts of two rooms, each of 16 groups of 4 episodes, under fixed weights: a policy that was
trained half-way (mean reward {reward:.2f}) and a critic that was fitted to it for {fitting} iterations. Replies have 1
to 4 tokens, episodes {turns[0]:.0f} to {turns[2]:.0f} turns (5th to 95th percentile, median {turns[1]:.0f}). The
gradient of a rollout is that of the sum over tokens of advantage times log-prob, per episode; GAE is whitened, as by
default. Products of means are taken over pairs of different rollouts, so that noise does not count as signal. The
cosine compares the mean gradients; being an estimate, it can lie above 1.
"""
READING = (
    "{best} has the lowest relative variance. "
    "As far as intervals tell, {lower} below RLOO and {higher} above it. {baseline}"
)
BASELINE = "optimal token baseline"
KEPT = "So the optimal token baseline has the lower variance that it was made for."
NOT_KEPT = (
    "So the optimal token baseline does not have the lower variance that it was made for, neither with an episode's "
    "own return in its baseline nor without; groups of four tell little about each place in an episode, and where only "
    "the longest one is left it has no baseline."
)


def told(names: Sequence[str]) -> str:
    """The names as the subject of a sentence, with its verb."""
    if not names:
        return "none is"
    quoted = [f"*{name}*" for name in names]  # some have commas
    joined = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    return f"{joined} {'is' if len(names) == 1 else 'are'}"


def cells(runs: Mapping[str, Any]) -> str:
    """Iterations of each seed and the median seconds."""
    if not runs:
        return " | "
    by_seed = [runs[str(seed)] for seed in SEEDS if str(seed) in runs]
    learned = [str(run["learned"]) if run["learned"] else f"not (ended at {run['curve'][-1]:.2f})" for run in by_seed]
    return f"{', '.join(learned)} | {statistics.median(run['seconds'] for run in by_seed):.1f}"


def learned_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    tasks = (BANDIT, TWO_ROOMS)
    lines = [
        f"| estimator | data | {' | '.join(f'{task.name} | seconds' for task in tasks)} |",
        "|---|---|---|--:|---|--:|",
    ]
    for name, cls in estimators().items():
        data = "groups" if in_groups(cls) else "turns"
        told_runs = " | ".join(cells(runs.get(key(name, task), {})) for task in tasks)
        lines.append(f"| `{name}` | {data} | {told_runs} |")
    return "\n".join(lines)


def key(name: str, task: Task) -> str:
    return f"{name}, {task.name}"


def noise_table(rows: Mapping[str, Any]) -> str:
    lines = ["| estimator | relative variance | against RLOO | cosine to RLOO |", "|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["variance"]["value"]):
        parts = [interval(row[column], digits) for column, digits in (("variance", 2), ("ratio", 2), ("cosine", 3))]
        lines.append(f"| {name} | {' | '.join(parts)} |")
    return "\n".join(lines)


def interval(x: Mapping[str, float], digits: int) -> str:
    return f"{x['value']:.{digits}f} ({x['low']:.{digits}f} to {x['high']:.{digits}f})"


def reading(rows: Mapping[str, Any]) -> str:
    best = min(rows, key=lambda name: rows[name]["variance"]["value"])
    lower = [name for name, row in rows.items() if row["ratio"]["high"] < 1]
    higher = [name for name, row in rows.items() if row["ratio"]["low"] > 1]
    baseline = KEPT if any(name.startswith(BASELINE) for name in lower) else NOT_KEPT
    text = READING.format(best=f"*{best}*", lower=told(lower), higher=told(higher), baseline=baseline)
    return textwrap.fill(text, 120)


def first_reward(runs: Mapping[str, Mapping[str, Any]], task: Task) -> float:
    """The highest of all runs."""
    return max(
        (run["curve"][0] for name, of in runs.items() if name.endswith(task.name) for run in of.values()), default=0
    )


def page(records: Mapping[str, Any]) -> str:
    runs = records.get("runs", {})
    text = HEAD.format(
        recent=RECENT,
        goal=GOAL,
        iterations=ITERATIONS,
        seeds=len(SEEDS),
        learned=learned_table(runs),
        bandit=BANDIT.name,
        rooms=TWO_ROOMS.name,
        first=first_reward(runs, BANDIT),
        first_rooms=first_reward(runs, TWO_ROOMS),
        rate=LEARNING_RATE,
        epochs=UPDATE_EPOCHS,
        mini_batches=MINI_BATCHES,
        bandit_episodes=BANDIT.episodes,
        rooms_episodes=TWO_ROOMS.episodes,
        bandit_turns=BANDIT.num_envs * BANDIT.turns_per_env,
        rooms_turns=TWO_ROOMS.num_envs * TWO_ROOMS.turns_per_env,
        pass_size=next(iter(GROUP_SIZES.values())),
    )
    if noise := records.get("noise"):
        text += NOISE.format(table=noise_table(noise["rows"]), reading=reading(noise["rows"]), **noise)
    return text


def write(records: Mapping[str, Any], path: Path) -> None:
    """The records as JSON and the page beside them."""
    draft = path.with_suffix(".draft")
    draft.write_text(as_json(records))
    draft.replace(path.with_suffix(".json"))  # a run that is stopped leaves whole records
    path.with_suffix(".md").write_text(page(records))


def as_json(records: Mapping[str, Any]) -> str:
    """One line a run."""
    lines = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"   {json.dumps(seed)}: {json.dumps(runs[seed])}" for seed in sorted(runs))
        + "}"
        for name, runs in sorted(records.get("runs", {}).items())
    ]
    body = '{\n "runs": {\n' + ",\n".join(lines) + "}"
    if "noise" in records:
        body += ',\n "noise": ' + json.dumps(records["noise"])
    return body + "\n}\n"
