"""`agentrl bisect`: where two chains part, and `same`, which `agentrl replay` asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_agentrl.callbacks.chain import FOLDER, Link, read_link, read_links
from lightning_agentrl.run_files import one_run

STAGES = ("rollout", "scores", "update", "weights", "validation")  # in the order of an iteration
_WORDS = {  # stand for texts or names, so their gaps mean nothing
    *("rollout/turn/observation", "rollout/turn/prompt", "rollout/turn/action", "rollout/turn/ended"),
    *("rollout/turn/metrics", "rollout/token/ids"),
}


@dataclass(frozen=True)
class Difference:
    """One number that two chains do not share."""

    iteration: int
    field: str  # "stage/level/name"
    place: str  # the turn, the token or the weight
    first: str
    second: str

    def __str__(self) -> str:
        stage, _, name = self.field.split("/", 2)
        where = f" of {self.place}" if self.place else ""
        return f"iteration {self.iteration}, {stage}: {name}{where} is {self.first} and {self.second}"


def bisect_runs(first: Path, second: Path, tolerance: float) -> list[str]:
    """Say where two runs part.

    Args:
        first: folder of a run; of several versions the newest is taken.
        second: folder of another one.
        tolerance: largest gap of numbers that does not count as beyond it, relative above 1.

    Returns:
        Sentences: the first difference at all, the first beyond the tolerance, and iterations in which a time limit
        struck, which depends on the machine.

    Raises:
        ValueError: a folder is not that of one run with a chain, they have no iteration in common, or the tolerance is
            below 0 or not a number.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0, got {tolerance:g}")
    runs = [one_run(folder, FOLDER) for folder in (first, second)]
    both = [read_links(run / FOLDER) for run in runs]
    common = sorted(set(both[0]) & set(both[1]))
    if not common:
        spans = [f"'{run}' ({min(chain)} to {max(chain)})" for run, chain in zip(runs, both, strict=True)]
        raise ValueError(
            f"the chains of {' and '.join(spans)} have no iteration in common; that of a run that went on begins in "
            "the version that it went on from"
        )
    at_all, beyond, struck = None, None, []
    for iteration in common:
        ranks = [sorted(chain[iteration]) for chain in both]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"the runs have {len(ranks[0])} and {len(ranks[1])} processes, which collect different turns"
            )
        for rank in ranks[0]:
            one, other = (read_link(chain[iteration][rank]) for chain in both)
            if time_limit_struck(one) or time_limit_struck(other):
                struck.append(iteration)
            at_all = at_all or first_difference(one, other, iteration)
            beyond = beyond or first_difference(one, other, iteration, tolerance)
        if beyond is not None:
            break
    said = [f"compared iterations {common[0]} to {iteration} of '{runs[0]}' and '{runs[1]}'"]
    if left_out := sorted((set(both[0]) ^ set(both[1])) & set(range(common[0], iteration))):
        said.append(f"not compared, since one of the chains lacks them: {', '.join(map(str, left_out))}")
    said.append("first difference: " + ("none, equal to the bit" if at_all is None else str(at_all)))
    if at_all is not None:
        said.append(f"first beyond {tolerance:g}: " + ("none" if beyond is None else str(beyond)))
    return [*said, *map(told_struck, dict.fromkeys(struck))]


def time_limit_struck(link: Link) -> bool:
    """Return whether an environment was over a time limit in this iteration; one of a warm-up may collect nothing."""
    return bool(link.get("rollout/turn/timeouts", np.zeros(0)).any())


def told_struck(iteration: int) -> str:
    return f"iteration {iteration}: a time limit struck, which depends on the machine"


def first_difference(a: Link, b: Link, iteration: int, tolerance: float | None = None) -> Difference | None:
    """Return the first difference in the order in which an iteration computes; None if there is none.

    Within the rollout that is the order of turns in each environment, since a turn follows from the ones before it.

    Args:
        a: fields of the iteration.
        b: the same of another run.
        iteration: its number.
        tolerance: largest gap that does not count, relative above 1; None: every bit counts.
    """
    names = list(a) + [name for name in b if name not in a]
    for stage in STAGES:
        found = [_difference(a, b, name, iteration, tolerance) for name in names if name.split("/")[0] == stage]
        if there := [one for one in found if one is not None]:
            return min(there, key=lambda one: one[0])[1]
    return None


def _difference(
    a: Link, b: Link, name: str, iteration: int, tolerance: float | None
) -> tuple[tuple[int, int], Difference] | None:
    """Return the first difference of a field after the turn in which it is, as episode and number; None if equal."""
    x, y = a.get(name), b.get(name)
    if x is None or y is None:
        if name.startswith(
            "validation/"
        ):  # the one of them that was stopped in it has it in another folder, or not yet
            return None
        values = ["there" if z is not None else "not there" for z in (x, y)]
        return (0, 0), Difference(iteration, name, "", *values)
    if name.startswith("weights/"):
        return _weight(x, y, name, iteration, tolerance)
    sizes, (x, y) = (x.size, y.size), (np.atleast_1d(z)[: min(x.size, y.size)] for z in (x, y))
    unequal = (x != y) & ~((x != x) & (y != y))  # NaN is not equal to itself
    if tolerance is not None and name not in _WORDS:
        x64, y64 = x.astype(float), y.astype(float)
        gaps = np.abs(x64 - y64) / np.maximum(1.0, np.maximum(np.abs(x64), np.abs(y64)))
        unequal &= ~(gaps <= tolerance)
    if not unequal.any():
        values = [f"{size} long" for size in sizes]
        return None if sizes[0] == sizes[1] else ((1 << 60, 0), Difference(iteration, name, "", *values))
    index = int(np.argmax(unequal))
    order, place = _place(a, name.split("/")[1], index)
    values = ["one text", "another"] if name in _WORDS - {"rollout/token/ids"} else [_shown(x[index]), _shown(y[index])]
    return order, Difference(iteration, name, place, *values)


def _weight(
    x: np.ndarray, y: np.ndarray, name: str, iteration: int, tolerance: float | None
) -> tuple[tuple[int, int], Difference] | None:
    if np.array_equal(x, y):
        return None
    one, other = (z[1:].view(np.float64) for z in (x, y))  # sum and sum of squares
    if tolerance is not None and bool((np.abs(one - other) <= tolerance * np.maximum(1.0, np.abs(one))).all()):
        return None
    _, level, weight = name.split("/", 2)
    values = [f"{int(z[0]):016x} (sum {_shown(z[1:].view(np.float64)[0])})" for z in (x, y)]
    return (0, 0), Difference(iteration, f"weights/{level}/checksum", weight, *values)


def _place(link: Link, level: str, index: int) -> tuple[tuple[int, int], str]:
    """Return episode and number of a turn, and the name of a turn, token or row."""
    if level not in ("turn", "token"):
        return (0, 0), f"row {index}" if level == "row" else ""
    turn = index if level == "turn" else int(link["rollout/token/turn"][index])
    env, episode, number = (int(link[f"rollout/turn/{name}"][turn]) for name in ("env", "episode", "index"))
    named = f"environment {env}, episode {episode}, turn {number}"
    if level == "token":
        named += f", token {index - int(np.argmax(link['rollout/token/turn'] == turn))}"
    return (episode, number), named


def _shown(x: np.generic) -> str:
    return f"{float(x):.9g}" if x.dtype.kind == "f" else str(x)
