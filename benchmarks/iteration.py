"""What an iteration costs beside its raw computation, and against an older version of this repository.

    .venv/bin/python benchmarks/iteration.py                        # the quickstart, six iterations
    git worktree add ../older COMMIT
    .venv/bin/python benchmarks/iteration.py --against ../older     # and both versions by turns, six times each
    .venv/bin/python benchmarks/iteration.py --against=../older --repeats=15 -- --data.init_args.num_envs=8

After each iteration the same turns are sampled, scored and trained on once more without environments, data module,
agent or logs: the raw seconds. Two neighbours in time make a ratio; the first iteration, in which the process gets its
memory, does not count. Writes a section of `docs/results/speed.md` and `iteration.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import put
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows, bootstrap_rows, evaluation_mode
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.engines import SamplingRequest
from lightning_agentrl.models.allocator import keep_freed_memory
from lightning_agentrl.rollout import MiniBatch
from lightning_agentrl.types import ModelInput, Rollout, Row, input_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "iteration.json"
STAGES = ("collect", "score", "update")


class RawStages(RolloutCallback):
    """Does the computation of each iteration again, once it is over."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.batches: list[Rollout] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.rollout = rollout

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.batches.clear()
        self.started = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: MiniBatch, batch_idx: int
    ) -> None:
        self.batches.append(batch.rollout)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PPOAgent)
        row = {"iteration": time.perf_counter() - self.started}
        for name, work in (("collect", self.sample), ("score", self.score), ("update", self.update)):
            started = time.perf_counter()
            work(pl_module)
            row[f"raw {name}"] = time.perf_counter() - started
        self.rows.append(row)

    def sample(self, agent: PPOAgent) -> None:
        """The k-th turns of all environments together, as many tokens as they have; no environment, no parser."""
        engine = agent.datamodule.engine
        waves: dict[int, list[ModelInput]] = {}
        lengths: dict[int, list[int]] = {}
        seen: dict[int, int] = {}
        for sample in self.rollout.samples:
            (turn,) = sample.turns
            wave = seen[turn.env] = seen.get(turn.env, -1) + 1
            waves.setdefault(wave, []).append(input_of(sample.segments[:-1]))
            lengths.setdefault(wave, []).append(len(sample.segments[-1]))

        async def together(prompts: Sequence[ModelInput], tokens: Sequence[int]) -> None:
            requests = [
                SamplingRequest(prompt, count, agent.temperature, seed)
                for seed, (prompt, count) in enumerate(zip(prompts, tokens, strict=True))
            ]
            await asyncio.gather(*map(engine.generate, requests))

        engine.sync(agent.policy_version)
        for wave, prompts in waves.items():
            asyncio.run(together(prompts, lengths[wave]))

    def score(self, agent: PPOAgent) -> None:
        """Actor with values, then the reference."""
        rows = action_rows(self.rollout)
        with evaluation_mode(agent):
            reader = agent.reader
            both = [*rows, *bootstrap_rows(self.rollout).values()]
            for model, those in ((agent.actor, both), (agent.models.reference, rows)):
                if model is None:
                    continue
                for index in reader.micro_batches(those):
                    packed = reader.pack([those[i] for i in index])
                    hidden = model.hidden(packed)
                    model.token_scores(hidden, packed.targets, agent.temperature)
                    if model is agent.actor and agent.critic is not None:
                        agent.critic(packed, hidden)

    def update(self, agent: PPOAgent) -> None:
        """Forward, backward and a step of AdamW, on a copy of the weights, for each mini-batch."""
        parameters = [p for p in agent.parameters() if p.requires_grad]
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in parameters], fused=True)
        copies = self.optimizer.param_groups[0]["params"]
        reader = agent.reader
        for batch in self.batches:
            rows: list[Row] = action_rows(batch)
            with agent.reader.precision():
                for index in reader.micro_batches(rows):
                    packed = reader.pack([rows[i] for i in index])
                    hidden = agent.actor.hidden(packed)
                    scores = agent.actor.token_scores(hidden, packed.targets, agent.temperature)
                    loss = -scores.logps.mean() - 0.001 * scores.entropy.mean()
                    if agent.critic is not None:
                        loss = loss + agent.critic(packed, hidden).square().mean()
                    loss.backward()
            for parameter, copy in zip(parameters, copies, strict=True):
                copy.grad, parameter.grad = parameter.grad, None
            torch.nn.utils.clip_grad_norm_(copies, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def measure_raw(config: str, iterations: int) -> list[dict[str, float]]:
    """Seconds of iterations and of their raw stages, without the first."""
    raw = RawStages()

    class Measured(AgentCLI):
        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(raw)  # type: ignore[attr-defined]
            return trainer

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["agentrl", *arguments(config, iterations + 1, Path(folder)), "--trainer.callbacks=[TurnLog]"]
        Measured()
    return raw.rows[1:]


def arguments(config: str, iterations: int, folder: Path) -> list[str]:
    return [
        *("fit", "--config", config, f"--trainer.max_epochs={iterations}"),
        *(f"--trainer.default_root_dir={folder}", "--trainer.enable_checkpointing=false"),
    ]


def measure_tree(tree: Path, config: str, iterations: int, options: Sequence[str]) -> dict[str, float]:
    """Median seconds of each stage in the iterations of a version after the first, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_agentrl", *arguments(config, iterations, Path(folder)), *options]
        subprocess.run(
            [*command, "--trainer.callbacks=[]", "--trainer.enable_progress_bar=false"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            check=True,
            capture_output=True,
        )
        (events,) = Path(folder).rglob("events.out.tfevents.*")
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        seconds = {stage: [event.value for event in accumulator.Scalars(f"time/{stage}_seconds")] for stage in STAGES}
        return {stage: median(seconds[stage][1:]) for stage in STAGES}


def report(results: dict[str, Any]) -> str:
    """The page, made from the seconds."""
    lines = [
        "## What an iteration costs",
        "",
        f"`{results['config']}`, {results['threads']} threads on a CPU. Written by `benchmarks/iteration.py` from",
        "`iteration.json`. A ratio compares two successive measurements and is given as median (range).",
        "",
    ]
    if raw := results.get("raw"):
        overhead = [row["iteration"] / sum(row[f"raw {stage}"] for stage in STAGES) for row in raw]
        lines += [
            "### Against its own raw computation",
            "",
            "After each iteration, a plain loop in the same process repeats it: the engine samples the same turns,",
            "actor, critic and reference read them, and they are trained on.",
            "",
            "| | median seconds |",
            "|---|---|",
            f"| whole iteration | {median(row['iteration'] for row in raw):.1f} |",
            *(f"| raw {s} | {median(row[f'raw {s}'] for row in raw):.1f} |" for s in STAGES),
            "",
            f"Iteration divided by the sum of its raw stages: {spread(overhead)}, {len(raw)} iterations.",
            "",
        ]
    for against in results.get("against", []):
        pairs = against["seconds"]
        stages = {stage: [older[stage] / ours[stage] for ours, older in pairs] for stage in STAGES}
        whole = [sum(older.values()) / sum(ours.values()) for ours, older in pairs]
        lines += [
            f"### Against commit {against['commit']}",
            "",
            "Both versions run alternately, each time in a new process with its own `quickstart.yaml`. Options:",
            f"`{' '.join(against['options']) or 'none'}`. Iterations of each process, without the first one: "
            f"{against['iterations'] - 1}.",
            "",
            "| stage | median seconds now | at that commit | ratio |",
            "|---|---|---|---|",
            *(
                f"| {s} | {median(a[s] for a, _ in pairs):.2f} | {median(b[s] for _, b in pairs):.2f} | {spread(r)} |"
                for s, r in stages.items()
            ),
            "",
            f"All stages, seconds at that commit divided by seconds now: {spread(whole)}, {len(pairs)} pairs.",
            "",
        ]
    return "\n".join(lines)


def spread(numbers: Sequence[float]) -> str:
    return f"**{median(numbers):.2f}** ({min(numbers):.2f} to {max(numbers):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml", help="from the root of the repository")
    parser.add_argument("--repeats", type=int, default=6, help="iterations, or pairs, that count")
    parser.add_argument("--against", type=Path, help="root of a checkout of an older version; only this is measured")
    parser.add_argument("--iterations", type=int, default=2, help="of each process of --against")
    parser.add_argument("options", nargs="*", help="of the command, for both versions, behind --")
    wanted = parser.parse_args()
    keep_freed_memory()
    os.chdir(ROOT)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {"config": wanted.config, "threads": torch.get_num_threads()}
    if wanted.against is None:
        results["raw"] = measure_raw(wanted.config, wanted.repeats)
    else:
        older = wanted.against.resolve()
        commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=older, text=True).strip()
        asked = wanted.config, wanted.iterations, wanted.options
        pairs = [[measure_tree(tree, *asked) for tree in (ROOT, older)] for _ in range(wanted.repeats)]
        measured = {"commit": commit, "seconds": pairs, "iterations": wanted.iterations, "options": wanted.options}
        results["against"] = [*(one for one in results.get("against", []) if one["commit"] != commit), measured]
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    put(RESULTS.with_name("speed.md"), "iteration", report(results))
    print(report(results))


if __name__ == "__main__":
    main()
