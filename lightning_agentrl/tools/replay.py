"""`agentrl replay` and `agentrl bisect`: rerun iterations from a checkpoint, and compare runs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import yaml

from lightning_agentrl.agents.checkpoint import recorded
from lightning_agentrl.callbacks.chain import FOLDER, Link, read_link, read_links
from lightning_agentrl.run_files import FACTS, json_object, one_run, owner_of

CHAIN_BEGINS = "the chain of a resumed run begins in the folder of the run that it continued"
STAGES = ("rollout", "scores", "update", "weights", "validation")  # stages of an iteration, in order
_WORDS = {  # fields with hashes of texts or names, whose distances have no meaning
    *("rollout/turn/observation", "rollout/turn/prompt", "rollout/turn/action", "rollout/turn/ended"),
    *("rollout/turn/metrics", "rollout/token/ids"),
}


@dataclass(frozen=True)
class Difference:
    """A difference between two chains."""

    iteration: int
    field: str  # "stage/level/name"
    place: str  # turn, token or weight
    first: str
    second: str

    def __str__(self) -> str:
        stage, _, name = self.field.split("/", 2)
        where = f" of {self.place}" if self.place else ""
        return f"iteration {self.iteration}, {stage}: {name}{where} is {self.first} and {self.second}"


def bisect_runs(first: Path, second: Path, tolerance: float) -> list[str]:
    """Report where two runs diverge.

    Args:
        first: folder of a run; the newest of several versions is used.
        second: folder of another run.
        tolerance: largest accepted difference; relative for numbers above 1.

    Returns:
        Sentences about the first difference, the first difference beyond the tolerance, and iterations in which an
        environment had a timeout, which depends on the machine.

    Raises:
        ValueError: a folder does not hold one run with a chain, or the runs have no iteration in common.
    """
    runs = [_with_chain(folder) for folder in (first, second)]
    both = [read_links(run / FOLDER) for run in runs]
    common = sorted(set(both[0]) & set(both[1]))
    if not common:
        spans = [f"'{run}' ({min(chain)} to {max(chain)})" for run, chain in zip(runs, both, strict=True)]
        raise ValueError(f"the chains of {' and '.join(spans)} have no iteration in common; {CHAIN_BEGINS}")
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
        said.append(f"not compared, since they are missing in one chain: {', '.join(map(str, left_out))}")
    said.append("first difference: " + ("none, equal to the bit" if at_all is None else str(at_all)))
    if at_all is not None:
        said.append(f"first beyond {tolerance:g}: " + ("none" if beyond is None else str(beyond)))
    return [*said, *map(told_struck, dict.fromkeys(struck))]


def _with_chain(folder: Path) -> Path:
    """Return the folder of a run with a chain; see :func:`one_run`.

    Raises:
        ValueError: the run has no chain; the message names the callback to add.
    """
    try:
        return one_run(folder, FOLDER)
    except ValueError as error:
        raise ValueError(f"{error}; add the callback Chain to trainer.callbacks of runs to compare") from error


def time_limit_struck(link: Link) -> bool:
    """Return whether an environment exceeded a time limit in this iteration."""
    return bool(link.get("rollout/turn/timeouts", np.zeros(0)).any())


def told_struck(iteration: int) -> str:
    return f"iteration {iteration}: an environment exceeded its time limit, which depends on the machine"


def first_difference(a: Link, b: Link, iteration: int, tolerance: float | None = None) -> Difference | None:
    """Return the first difference in the order of an iteration's computations, or None without a difference.

    Within the rollout, turns of each environment are compared in order.

    Args:
        a: fields of the iteration in one run.
        b: fields of the iteration in the other run.
        iteration: number of the iteration.
        tolerance: largest accepted difference, relative for numbers above 1; None requires equality to the bit.
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
    """Return the first difference of a field, preceded by episode and turn index; None without a difference."""
    x, y = a.get(name), b.get(name)
    if x is None or y is None:
        # A run that was stopped in a validation has the results in another folder, or not yet.
        if name.startswith("validation/"):
            return None
        values = ["present" if z is not None else "missing" for z in (x, y)]
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
    one, other = (z[1:].view(np.float64) for z in (x, y))  # sum and norm of the weights
    if tolerance is not None and bool((np.abs(one - other) <= tolerance * np.maximum(1.0, np.abs(one))).all()):
        return None
    _, level, weight = name.split("/", 2)
    values = [f"{int(z[0]):016x} (sum {_shown(z[1:].view(np.float64)[0])})" for z in (x, y)]
    return (0, 0), Difference(iteration, f"weights/{level}/checksum", weight, *values)


def _place(link: Link, level: str, index: int) -> tuple[tuple[int, int], str]:
    """Return episode and index of a turn, and the name of the turn, token or row."""
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


CONFIG = "config.yaml"

# Callbacks that a replay leaves out, since they write files into the folder of the run or need a logger.
_WRITERS = {
    *("Chain", "ModelCheckpoint", "PolicyFolder", "RolloutReport", "RunCheckpoints", "RunSummary", "StageProgress"),
    *("TurnLog", "DeviceStatsMonitor", "LearningRateMonitor"),
}


class StopAfter(L.Callback):
    """End a run after an iteration without changing ``max_epochs``, on which learning rates may depend."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here and not earlier, since an earlier stop would cause a validation that the run did not have."""
        if trainer.current_epoch + 1 >= self.iteration:
            trainer.should_stop = True


def replay_iteration(run: Path, iteration: int | None, folder: Path) -> tuple[bool, list[str]]:
    """Rerun from the nearest checkpoint before an iteration, and compare every field up to that iteration.

    Args:
        run: folder of the run, with its config.yaml and chain; the newest of several versions is used.
        iteration: number of the iteration, from 1. Default: the last iteration.
        folder: empty folder for the replay.

    Returns:
        Whether everything is equal to the bit, and sentences about the result.

    Raises:
        ValueError: the run lacks a config, a chain or this iteration, or the replay failed.
    """
    run = _with_chain(run)
    chain = read_links(run / FOLDER)
    iteration = max(chain) if iteration is None else iteration
    if iteration not in chain:
        raise ValueError(
            f"the chain of '{run}' has iterations {min(chain)} to {max(chain)}, not {iteration}; {CHAIN_BEGINS}"
        )
    config = yaml.safe_load((one_run(run, CONFIG) / CONFIG).read_text(encoding="utf-8"))
    checkpoint, done = checkpoint_before(run, iteration)
    (folder / "replay.yaml").write_text(yaml.safe_dump(_quiet(config, folder, iteration)))
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(folder / "replay.yaml"), "--quiet"]
    command += [] if checkpoint is None else ["--ckpt_path", str(checkpoint)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(f"the replay failed: {(ended.stderr.strip().splitlines() or ['it wrote no message'])[-1]}")
    again = read_links(folder / FOLDER)
    since = "the start" if checkpoint is None else f"'{checkpoint}' (iteration {done})"
    said = [f"replayed iterations {done + 1} to {iteration} of '{run}' from {since}"]
    for number in range(done + 1, iteration + 1):
        if number not in chain:
            said.append(f"iteration {number} is no longer in the chain of the run and was not compared")
            continue
        _check_processes(number, chain[number], again[number])
        for rank, path in chain[number].items():
            old, new = read_link(path), read_link(again[number][rank])
            said += [told_struck(number)] if time_limit_struck(old) or time_limit_struck(new) else []
            if difference := first_difference(old, new, number):
                return False, [*said, f"first difference (run, replay): {difference}"]
    return True, [*said, f"iteration {iteration} is the same to the bit"]


def _check_processes(iteration: int, of_run: Collection[int], of_replay: Collection[int]) -> None:
    """Check that run and replay have the same ranks in an iteration; a resumed run may have another number of ranks.

    Raises:
        ValueError: the ranks differ; the message contains both numbers of ranks.
    """
    if set(of_run) != set(of_replay):
        raise ValueError(
            f"iteration {iteration} was run by {len(of_run)} processes and replayed by {len(of_replay)}, the number in "
            "the run's latest config, so they have collected different turns"
        )


def checkpoint_before(run: Path, iteration: int | None) -> tuple[Path | None, int]:
    """Return the newest checkpoint (before ``iteration``, if given) and the number of iterations before the checkpoint.

    A checkpoint is a file or, for sharded runs, a folder. Checkpoints of other runs in the same folder are ignored.
    Return (None, 0) without a checkpoint.
    """
    others = {file.parent for file in run.glob(f"*/**/{FACTS}")}  # folders of other runs below this folder
    own = [path for path in run.glob("**/*.ckpt") if not path.is_symlink() and others.isdisjoint(path.parents)]
    owner, read = owner_of(run), {path: saved for path in own if (saved := _saved(path)) is not None}
    done = {path: count for path, (count, run_id) in read.items() if owner.owns(path, run_id)}
    before = {path: count for path, count in done.items() if iteration is None or count < iteration}
    newest = max(before, key=lambda path: before[path], default=None)
    if newest is not None:
        return newest, before[newest]
    facts = json_object(run / FACTS)
    if not facts.get("continues") or iteration is None:
        return None, 0
    continued, count = _continued(Path(facts["continues"]), run, str(facts.get("run_id", "")))
    if continued is None:
        raise ValueError(
            f"the run in '{run}' was resumed from '{facts['continues']}', which is missing or damaged, and has no "
            f"other checkpoint before iteration {iteration}, so it cannot be replayed"
        )
    # If the checkpoint is not before the iteration, the run began in the same folder before the checkpoint.
    return (continued, count) if count < iteration else (None, 0)


def _continued(named: Path, run: Path, run_id: str) -> tuple[Path | None, int]:
    """Return the checkpoint from which a run was resumed, and the number of iterations before the checkpoint.

    A relative path starts in the folder in which the run was started, usually a parent of the run's folder. If run
    and checkpoint were moved together, the end of the path is still valid below a parent of the run's folder.

    Args:
        named: path of the checkpoint as the run recorded it.
        run: folder of the run.
        run_id: id of the run.
    """
    ends = [Path(*named.parts[start:]) for start in range(len(named.parts))]
    for path in (root / end for end in ends for root in (*run.resolve().parents, Path.cwd())):
        if path.exists() and (saved := _saved(path)) is not None and saved[1] == run_id:
            return path, saved[0]
    return None, 0


def _saved(path: Path) -> tuple[int, str] | None:
    """Return the number of iterations before a checkpoint, and the id of its run.

    The epoch in the checkpoint may be the last of these iterations or the next iteration. Warn and return None if the
    file is damaged or not a checkpoint of a run.
    """
    run_id, done, *_ = recorded(path)
    if done < 0:
        warnings.warn(f"'{path}' is damaged or not a checkpoint of a run, and is ignored", stacklevel=2)
        return None
    return done, run_id


def _quiet(config: dict[str, Any], folder: Path, iteration: int) -> dict[str, Any]:
    """Return the config of a replay that ends with the iteration and writes only into this folder."""
    trainer = config["trainer"]
    given = trainer.get("callbacks") or []
    kept = [one for one in (given if isinstance(given, list) else [given]) if _name(one) not in _WRITERS]
    trainer |= {
        "callbacks": [
            *kept,
            {"class_path": "lightning_agentrl.callbacks.Chain", "init_args": {"keep": iteration}},
            {"class_path": f"{__name__}.{StopAfter.__name__}", "init_args": {"iteration": iteration}},
        ],
        "logger": False,
        "enable_checkpointing": False,
        "default_root_dir": str(folder),
        "min_epochs": iteration,  # prevents other callbacks from ending the replay earlier
    }
    return {name: value for name, value in config.items() if name not in ("ckpt_path", "dry_run", "quiet")}


def _name(callback: dict[str, Any]) -> str:
    return str(callback["class_path"]).rsplit(".", 1)[-1]
