"""What the proof of the engine takes in a run: seconds at its start, and its share of later iterations.

    python benchmarks/engines/proof_cost.py --config configs/quickstart.yaml --trainer.max_epochs 3

Trains with the arguments, which are those of `agentrl fit`. The first iteration is left out of the share.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_agentrl.agents.proof import EngineProof
from lightning_agentrl.commands.fit import AgentCLI

SECONDS: defaultdict[str, list[float]] = defaultdict(list)


def timed(name: str) -> Callable[..., Any]:
    method = getattr(EngineProof, name)

    def run(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            SECONDS[name].append(time.perf_counter() - started)

    return run


class Iterations(L.Callback):
    """Notes when each iteration begins and ends, and what of the proof is in it."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started, self.before = time.perf_counter(), sum(map(sum, SECONDS.values()))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        proof = sum(map(sum, SECONDS.values())) - self.before
        whole = time.perf_counter() - self.started
        print(
            f"iteration {trainer.current_epoch + 1}: {whole:.2f} s, proof {proof:.4f} s, {proof / whole:.2%}",
            flush=True,
        )


def main() -> None:
    for name in ("at_start", "after_update", "of_rollout"):
        setattr(EngineProof, name, timed(name))
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
        arguments = [*sys.argv[1:], *quiet, "--trainer.default_root_dir", folder, "--trainer.callbacks", "null"]
        cli = AgentCLI([*arguments, "--trainer.enable_checkpointing", "false"], run=False)
        cli.trainer.callbacks.append(Iterations())
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    for name, seconds in SECONDS.items():
        print(f"{name}: {len(seconds)} times, {', '.join(f'{s:.4f}' for s in seconds)} s")


if __name__ == "__main__":
    main()
