"""Whether two commits train alike to the bit: metrics, turns, weights and optimizer states of tiny runs.

    python benchmarks/same_as.py main                     # main against the working tree
    python benchmarks/same_as.py main HEAD --cases lora   # two commits, one case

A change that moves code must change no numbers. Both commits run the same commands and configs on this machine, one
thread per process. The program reads only what users see: the command, config keys, logged metrics, the turn log (seven
digits, with held-out episodes), checkpoints and cloned models. `same_as_cases.py` lists the cases and has tables of
what was renamed since. All cases take two to three minutes on two idle cores. Exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.same_as_cases import (
    ADDED,
    KEYS,
    METRICS,
    REWRITTEN,
    TURNS,
    WEIGHTS,
    Case,
    Config,
    Rule,
    cases,
    of_class,
    translated,
)
from tests.tiny import tiny_model_folder, tiny_vision_folder

ROOT = Path(__file__).resolve().parents[1]

PARTS = {"metrics": METRICS, "turns": TURNS, "weights": WEIGHTS, "optimizer": []}
PACKAGES = ("lightning_agentrl", "envs")
SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
SETTINGS |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# The id of a run, wall-clock times and what is made of them. Shares of the update (time/update_shared) are no times.
TIMES = re.compile(r"run_id|.*_seconds|.*_per_second|time/collect_to_update|time/env_to_generation")

Row = dict[str, Any]  # plain values by name


@dataclass(frozen=True)
class Difference:
    """The first of two records."""

    place: str
    name: str
    old: str
    new: str
    unequal: int  # values, of all
    values: int

    def __str__(self) -> str:
        return f"{self.name} at {self.place}: {self.old} != {self.new} ({self.unequal} of {self.values} values differ)"


@dataclass
class Notes:
    """What was done to names before they were compared."""

    renamed: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)


def compare(old: Sequence[Row], new: Sequence[Row]) -> Difference | int:
    """The first difference of two records, or how many values are equal, without those that only new commits have.

    Floats are equal when they have the same digits, NaN when both are; True, 1 and 1.0 are three values.
    """
    first: tuple[str, str, str, str] | None = None
    unequal = values = 0
    missing: Row = {}
    for index, (a, b) in enumerate(zip_longest(old, new, fillvalue=missing)):
        for name in [*a, *(name for name in b if name not in a)]:
            if a and b and (name in a) != (name in b) and ADDED.fullmatch(name):
                continue
            one, other = (repr(row[name]) if name in row else "nothing" for row in (a, b))
            values += 1
            if one != other:
                unequal += 1
                step = "".join(f", {key} {a[key]}" for key in ("iteration", "step", "env", "turn") if key in a)
                first = first or (f"row {index}{step}", name, one, other)
    return values if first is None else Difference(*first, unequal, values)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings and lists as one: ``metrics.clicks``, ``reply_ids[3]``."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flat(inner, f"{name}[{index}]")
    else:
        yield name, value


def named(row: Iterable[tuple[str, Any]], rules: Sequence[Rule], notes: Notes) -> Row:
    """Values by their new names, without times. A rule is about a whole name, or about its beginning before . / or [.

    Raises:
        ValueError: two values have one name.
    """
    values: Row = {}
    for name, value in row:
        if TIMES.fullmatch(name):
            notes.left_out.add(name)
            continue
        new = name
        for pattern, replacement in rules:
            new = re.sub(rf"\A(?:{pattern})(?=\Z|[./\[])", replacement, new)
        if new != name:
            notes.renamed.add(f"{name} -> {new}")
        if new in values:
            raise ValueError(f"two values are called {new}; one of them was {name}")
        values[new] = value
    return values


def record(folder: Path, notes: Notes) -> dict[str, list[Row]]:
    """What a run left behind, part by part."""
    rows: dict[str, list[Iterable[tuple[str, Any]]]] = {part: [] for part in PARTS}
    for file in sorted(folder.glob("metrics/**/metrics.csv")):
        lines = csv.DictReader(file.read_text().splitlines())
        rows["metrics"] += [[(k, float(v)) for k, v in line.items() if v] for line in lines]
    for file in sorted(folder.glob("turns/**/*.jsonl")):
        rows["turns"] += [flat(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    rows["weights"] = [[(name, digest(x)) for name, x in checkpoint["state_dict"].items()]]
    states = [by_place(state) for state in checkpoint["optimizer_states"]]
    rows["optimizer"] = [[(name, digest(x) if isinstance(x, torch.Tensor) else x) for name, x in flat(states)]]
    for file in sorted(folder.glob("*/*.safetensors")):  # written by `agentrl clone`
        rows["weights"].append([(f"{file.parent.name}/{name}", digest(x)) for name, x in load_file(file).items()])
    return {part: [named(row, PARTS[part], notes) for row in rows[part]] for part in PARTS}


def by_place(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with parameters numbered by their place in it: versions number them differently."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    place = {number: index for index, number in enumerate(numbers)}
    return {
        "state": {place[number]: values for number, values in state["state"].items()},
        "param_groups": [group | {"params": [place[n] for n in group["params"]]} for group in state["param_groups"]],
    }


def digest(tensor: torch.Tensor) -> str:
    """Type, shape, norm and hash of all bytes."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    norm = tensor.double().norm().item()
    return f"{tensor.dtype} {list(tensor.shape)} norm {norm:.17g} sha256 {hashlib.sha256(data).hexdigest()[:16]}"


class Command:
    """`agentrl` of one checkout, in folders that it is given."""

    def __init__(self, runner: subprocess.Popen[str]) -> None:
        self.runner = runner
        self.packages = json.loads(self._answer() or "[]")

    def __call__(self, folder: Path, *arguments: str, expected: int = 0) -> str:
        """Run it; return the end of its log if it ended with another exit code than expected."""
        print(json.dumps([str(folder), arguments]), file=self.runner.stdin, flush=True)
        code = self._answer()
        return "" if code == str(expected) else f"exit code {code}: {(folder / 'log.txt').read_text().strip()[-600:]}"

    def _answer(self) -> str:
        assert self.runner.stdout
        return self.runner.stdout.readline().strip()


class Checkout:
    """The package at one commit, or as it is in the working tree, in a folder of its own."""

    def __init__(self, commit: str | None, folder: Path) -> None:
        self.folder, self.source = folder, folder / "source"
        self.source.mkdir(parents=True)
        if commit is None:
            self.name = f"working tree on {git('rev-parse', '--short', 'HEAD')}"
            for package in PACKAGES:
                shutil.copytree(ROOT / package, self.source / package, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            self.name = git("rev-parse", "--short", f"{commit}^{{commit}}")
            archive = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", self.source], input=archive.stdout, check=True)
        (self.source / "agentrl_envs").symlink_to("envs")
        self.renamed: set[str] = set()  # keys of configs

    def run(self, wanted: dict[str, Case]) -> dict[str, str]:
        """Run the cases one after the other; what went wrong in each, or nothing."""
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
        path = os.pathsep.join(map(str, (self.source, self.folder.parent)))  # beside both is the game
        runner = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "benchmarks" / "same_as_runner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=settings | SETTINGS | {"PYTHONPATH": path},
            cwd=self.folder,
        )
        with runner:
            agentrl = Command(runner)
            for place in agentrl.packages or ["nowhere"]:
                if not Path(place).resolve().is_relative_to(self.source.resolve()):
                    raise SystemExit(f"{self.name}: a package was imported from {place}, not from {self.source}")
            printed = self._printed(agentrl)
            return {name: self._run(case, self.folder / name, agentrl, printed) for name, case in wanted.items()}

    def _run(self, case: Case, folder: Path, agentrl: Command, printed: Config) -> str:
        config, renamed = translated(case.config, printed, KEYS, REWRITTEN)
        self.renamed |= set(renamed)
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        codes = [case.code] * (len(case.runs) - 1) + [0]
        failures = (
            agentrl(folder, subcommand, "--config", "config.yaml", *arguments, expected=code)
            for (subcommand, *arguments), code in zip(case.runs, codes, strict=True)
        )
        failure = next(filter(None, failures), "")
        print(f"{self.name}: {folder.name}{' failed' if failure else ''}", file=sys.stderr, flush=True)
        return failure

    def _printed(self, agentrl: Command) -> Config:
        """Every key of the command, with its default."""
        folder = self.folder / "keys"
        folder.mkdir()
        config = {"model": of_class("PPOAgent", model="any"), "data": of_class("RolloutDataModule")}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if failure := agentrl(folder, "fit", "--config", "config.yaml", "--print_config"):
            raise SystemExit(f"{self.name} does not print its config: {failure}")
        return yaml.safe_load((folder / "out.txt").read_text())


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def cell(result: Difference | int) -> str:
    if isinstance(result, Difference):
        return f"DIFFERENT ({result.unequal} of {result.values})"
    return f"equal ({result})" if result else "NOTHING RECORDED"


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether two commits train alike to the bit.")
    parser.add_argument("commit", help="the old one")
    parser.add_argument("other", nargs="?", help="the new one; the working tree when not given")
    parser.add_argument("--cases", help="names with commas between them; all when not given")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs, and say where it is")
    parser.add_argument("--out", type=Path, help="a JSON file with everything that is told")
    given = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="same_as_"))
    try:
        disable_progress_bar()
        shutil.copy(ROOT / "benchmarks" / "same_as_game.py", folder)
        model = tiny_model_folder(folder / "model")
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(f'{{"prompt": "{a} + 1 is", "answer": "{a + 1}"}}\n' for a in range(5)))
        wanted = cases(model, tiny_vision_folder(folder / "vision"), tasks)
        if given.cases:
            unknown = set(given.cases.split(",")) - wanted.keys()
            if unknown:
                raise SystemExit(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(wanted)}")
            wanted = {name: wanted[name] for name in given.cases.split(",")}
        comparison = compare_commits(given.commit, given.other, wanted, folder)
    finally:
        if given.keep:
            print(f"the runs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    if given.out:
        given.out.write_text(json.dumps(comparison, indent=2) + "\n")
    sys.exit(0 if comparison["equal"] else 1)


def compare_commits(commit: str, other: str | None, wanted: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Run both and print the table; everything that was found, for a file."""
    sides = [Checkout(commit, folder / "old"), Checkout(other, folder / "new")]
    with ThreadPoolExecutor(2) as executor:
        failures = list(executor.map(lambda side: side.run(wanted), sides))
    notes = [Notes(), Notes()]
    results: dict[str, Any] = {}
    troubles = []
    print(f"old: {sides[0].name}, new: {sides[1].name}; in brackets how many values were compared\n")
    print(f"| case | {' | '.join(PARTS)} |\n|{' --- |' * (len(PARTS) + 1)}")
    for name in wanted:
        broken = [
            f"{name}, {side.name}: {failed[name]}" for side, failed in zip(sides, failures, strict=True) if failed[name]
        ]
        if broken:
            troubles += broken
            results[name] = {"failed": broken}
            print(f"| {name} |{' FAILED |' * len(PARTS)}")
            continue
        old, new = (record(side.folder / name, note) for side, note in zip(sides, notes, strict=True))
        found = {part: compare(old[part], new[part]) for part in PARTS}
        troubles += [f"{name}, {part}: {x}" for part, x in found.items() if isinstance(x, Difference)]
        results[name] = {part: asdict(x) if isinstance(x, Difference) else x for part, x in found.items()}
        print(f"| {name} | {' | '.join(map(cell, found.values()))} |", flush=True)
    equal = all(isinstance(x, int) and x for parts in results.values() for x in parts.values())
    print("\n" + "".join(f"{trouble}\n" for trouble in troubles) + ("all equal" if equal else "not equal"))
    renamed = {}
    for label, side, note in zip(("old", "new"), sides, notes, strict=True):
        renamed[label] = sorted(note.renamed | side.renamed)
        print(f"renamed in {label}: {', '.join(renamed[label]) or 'nothing'}")
    left_out = sorted(notes[0].left_out | notes[1].left_out)
    print(f"left out as times or ids of runs: {', '.join(left_out)}")
    names = {"old": sides[0].name, "new": sides[1].name}
    return {**names, "equal": equal, "cases": results, "renamed": renamed, "left_out": left_out}


if __name__ == "__main__":
    main()
