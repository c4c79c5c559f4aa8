"""Updates of this package against TRL's GRPO trainer and plain transformers: one command, one table.

    make benchmarks                                             # everything, about an hour and a half on two cores
    .venv/bin/python benchmarks/speed/compare.py --only trl-85  # one, or all with this in their key
    .venv/bin/python benchmarks/speed/compare.py --tune         # find the best micro-batch sizes anew

Two processes hold a model each. They take steps in turn, the other one asleep, so that each ratio is of two neighbours
in time. Writes `docs/results/speed.md` and the numbers behind it, `speed.json`; comparisons that were not run keep
their lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages import put
from benchmarks.speed.comparisons import COMPARISONS, OUR_TOKENS, Comparison
from benchmarks.speed.contender import TRL, Contender, Step
from benchmarks.speed.job import Job
from benchmarks.speed.report import line, markdown, summary, versions
from benchmarks.speed.tuning import TUNED, tune, tuned_size
from lightning_agentrl.models.demo import NAME, demo_model_folder

ROOT = Path(__file__).resolve().parents[2]

# Between two gradient norms, relative. With advantages of both signs most of a gradient cancels, rounding does not.
TOLERANCE = {"bf16": 0.1, "float32": 1e-4}
CHECK_TURNS = 16  # of the check in float32


def jobs_of(comparison: Comparison, job: Job, their_size: int) -> tuple[Job, Job]:
    """Ours and theirs."""
    case, precision, theirs = comparison.case, comparison.precision, comparison.theirs
    common = replace(job, case=case, precision=precision)
    return (
        replace(common, micro_batch=job.micro_batch, variant=comparison.ours.variant or job.variant),
        replace(
            common,
            micro_batch=their_size,
            variant=theirs.variant,
            episodes=theirs.episodes,
        ),
    )


def measure(comparison: Comparison, job: Job, repeats: int, their_size: int) -> dict[str, Any]:
    """Seconds of both sides, step by step, and whether they computed the same."""
    our_job, their_job = jobs_of(comparison, job, their_size)
    sides = comparison.ours.module, comparison.theirs.module
    with ExitStack() as beside:
        exact: list[Contender] = []  # they load while the others do, and step when these have left
        if not their_job.episodes:
            jobs = exact_jobs(comparison, our_job, their_job)
            exact = [beside.enter_context(Contender(side, job)) for side, job in zip(sides, jobs, strict=True)]
        with Contender(sides[0], our_job) as ours, Contender(sides[1], their_job) as theirs:
            for contender in (*exact, ours, theirs):
                contender.wait_until_ready()
            first = ours.step(), theirs.step()  # warms up; both from the same weights
            steps = [(ours.step(), theirs.step()) for _ in range(repeats)]
        exact_error = checked((exact[0].step(), exact[1].step()), "float32") if exact else None
    return {
        "setting": comparison.setting,
        "theirs": comparison.theirs.name + (f" ({note})" if (note := steps[-1][1].note) else ""),
        "goal": comparison.goal,
        "turns": job.turns,
        "threads": job.threads,
        "model": NAME if job.model == str(demo_model_folder()) else Path(job.model).name,
        "device": job.device,
        "our_kernels": our_job.variant,
        "micro_batch": [our_job.micro_batch, their_job.micro_batch],
        "seconds": [[a.seconds for a, _ in steps], [b.seconds for _, b in steps]],
        "idle_cpu": max(step.idle_cpu for pair in steps for step in pair),
        "peak_bytes": [step.peak_bytes for step in steps[-1]],
        "norm_error": checked(first, comparison.precision) if exact else None,
        "norm_error_float32": exact_error,
        "busy_cores": [  # all threads at work would be their number; less tells that something else ran beside
            statistics.median(step.cpu_seconds / step.seconds for step in side) for side in zip(*steps, strict=True)
        ],
    }


def exact_jobs(comparison: Comparison, our_job: Job, their_job: Job) -> tuple[Job, Job]:
    """Of few turns and without rounding."""
    ours, theirs = (replace(job, precision="float32", turns=CHECK_TURNS) for job in (our_job, their_job))
    if comparison.theirs.module == "trl_grpo":  # counts in rows
        theirs = replace(theirs, micro_batch=min(theirs.micro_batch, CHECK_TURNS))
    return ours, theirs


def checked(pair: tuple[Step, Step], precision: str) -> float:
    """Relative difference of the gradient norms, which differ where anything in the update does.

    Raises:
        RuntimeError: the two sides computed something else.
    """
    ours, theirs = pair
    error = abs(ours.grad_norm - theirs.grad_norm) / theirs.grad_norm
    if error > TOLERANCE[precision] or abs(ours.loss - theirs.loss) > TOLERANCE[precision] * abs(theirs.loss) + 1e-5:
        raise RuntimeError(f"the sides computed different things: {ours} and {theirs}")
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a key, or a part of several keys, of comparisons to run")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each side that count")
    parser.add_argument("--turns", type=int, default=128, help="turns of a step")
    parser.add_argument("--tune", action="store_true", help="find all best micro-batch sizes anew")
    parser.add_argument("--model", default="demo", help="demo, or the folder of a model")
    parser.add_argument("--their-size", type=int, help="of their micro-batches; the tuned one, if not given")
    parser.add_argument("--device", choices=OUR_TOKENS, default="cpu")
    parser.add_argument("--our-tokens", type=int, help="of our micro-batches; as in the configs, if not given")
    parser.add_argument("--our-kernels", default="", help="our `kernels`, where a comparison leaves them open")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of speed.md and speed.json")
    wanted = parser.parse_args()
    chosen = [c for c in COMPARISONS if c.key == wanted.only] or [c for c in COMPARISONS if wanted.only in c.key]
    if not chosen:
        raise SystemExit(f"no comparison has '{wanted.only}' in its key: {', '.join(c.key for c in COMPARISONS)}")
    has_trl = TRL.exists() or importlib.util.find_spec("trl")
    if not has_trl and any(c.theirs.module.startswith("trl") for c in chosen):
        raise SystemExit("TRL has an environment of its own; `make benchmarks` makes it")
    folder = str(demo_model_folder()) if wanted.model == "demo" else wanted.model
    tokens = wanted.our_tokens or OUR_TOKENS[wanted.device]
    job = Job(chosen[0].case, wanted.turns, folder, "bf16", tokens, wanted.our_kernels, device=wanted.device)
    wanted.out.mkdir(parents=True, exist_ok=True)
    usual = wanted.model == "demo" and wanted.device == "cpu"
    tuned = TUNED if usual else wanted.out / "tuned.json"
    if wanted.their_size is None:
        tune(chosen, job, anew=wanted.tune, file=tuned)
    file = wanted.out / "speed.json"
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    for comparison in chosen:
        theirs = comparison.theirs, comparison.case, comparison.precision
        size = wanted.their_size or tuned_size(*theirs, tuned)
        results[comparison.key] = measure(comparison, job, wanted.repeats, size)
        ordered = {c.key: results[c.key] for c in COMPARISONS if c.key in results}
        file.write_text(json.dumps({"versions": versions(), "results": ordered}, indent=2) + "\n")
        put(file.with_suffix(".md"), "speed", markdown(ordered, versions()))
        print(f"{comparison.key}: {line(results[comparison.key])}", flush=True)
    print(file.with_suffix(".md").read_text())
    print(json.dumps(summary(results[chosen[-1].key])))


if __name__ == "__main__":
    main()
