"""Trace one training iteration of `agentrl fit` without callbacks: `python -m tests.walk`, from the project's root.

A tiny random model plays three iterations; the second is traced. Prints as JSON how many files and functions run of the
package, the lines executed of each file, and the pairs of files between which the way crosses.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import yaml

from tests.cli import small_config
from tests.tiny import tiny_model_folder

PACKAGE = f"{Path(__file__).parents[1] / 'lightning_agentrl'}{os.sep}"


class Walk(L.Callback):
    """What runs: `start` before the first iteration, `iteration` in the second."""

    def __init__(self) -> None:
        self.phase = "start"
        self.functions: dict[str, set[tuple[str, str, int]]] = defaultdict(set)  # file, name, first line
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.sequences: dict[int, list[str]] = defaultdict(list)  # files by thread

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.phase = "iteration" if trainer.current_epoch == 1 else "other"

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return None
        name = code.co_filename.removeprefix(PACKAGE)
        self.functions[self.phase].add((name, code.co_name, code.co_firstlineno))
        self._move(name)

        def local(inner: FrameType, kind: str, value: Any) -> Any:
            if kind == "line":
                self.lines[self.phase][name].add(inner.f_lineno)
            elif kind == "return":
                caller = inner.f_back
                while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                    caller = caller.f_back
                if caller is not None:
                    self._move(caller.f_code.co_filename.removeprefix(PACKAGE))
            return local

        return local

    def _move(self, name: str) -> None:
        sequence = self.sequences[threading.get_ident()]
        if self.phase == "iteration" and sequence[-1:] != [name]:
            sequence.append(name)

    def report(self) -> dict[str, Any]:
        pairs = {frozenset(pair) for names in self.sequences.values() for pair in pairwise(names)}
        files = {phase: {name for name, *_ in self.functions[phase]} for phase in ("start", "iteration")}
        return {
            "files_before": len(files["start"]),
            "files": len(files["iteration"]),
            "functions": len(self.functions["iteration"]),
            "lines": {name: len(lines) for name, lines in self.lines["iteration"].items()},
            "pairs": len(pairs),
        }


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    torch.set_num_threads(1)
    config = small_config(tiny_model_folder(folder / "model"))
    config["trainer"] |= {"max_epochs": 3, "callbacks": [], "check_val_every_n_epoch": 1000}
    config["trainer"]["default_root_dir"] = str(folder / "run")
    (folder / "given.yaml").write_text(yaml.safe_dump(config))

    from lightning_agentrl.commands import fit
    from lightning_agentrl.commands.main import main as agentrl

    walk, instantiate = Walk(), fit.AgentCLI.instantiate_trainer

    def instantiate_trainer(self: Any, **arguments: Any) -> Any:
        trainer = instantiate(self, **arguments)
        trainer.callbacks = [walk]  # type: ignore[attr-defined]
        return trainer

    fit.AgentCLI.instantiate_trainer = instantiate_trainer  # type: ignore[method-assign]
    sys.argv = ["agentrl", "fit", "--config", "given.yaml"]
    threading.settrace(walk.trace)
    sys.settrace(walk.trace)
    try:
        agentrl()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.settrace(None)
        threading.settrace(None)
    print(json.dumps(walk.report()))


if __name__ == "__main__":
    main()
