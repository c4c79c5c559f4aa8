"""Curves and a table of quickstart runs with several seeds: `make seeds`, or, when the runs are there,

    python benchmarks/quickstart_seeds.py runs/seed0 runs/seed1 runs/seed2

Reads `summary.json`, `config.yaml` and the TensorBoard events of each run folder, plays the baselines on the same
held-out seeds, and writes `quickstart.png` and `quickstart.md` to `docs/results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import matplotlib as mpl
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl_envs.baselines import Baseline, constant_agent, random_agent
from benchmarks.pages import put
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.metrics.episodes import wilson_interval

mpl.use("Agg")
import matplotlib.pyplot as plt

CURVES = {"rollout/success": "success of training episodes", "rollout/reward_per_turn": "reward per turn"}


@dataclass(frozen=True)
class Run:
    """What one run folder holds."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    facts: dict[str, Any]  # versions and machine
    curves: dict[str, list[tuple[int, float]]]  # iteration, value
    warmup: int  # iterations before the actor moves

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    def successes(self, when: str) -> tuple[int, int]:
        """Successful held-out episodes and all of them, "before" or "after" training."""
        numbers = self.summary[when]
        return round(numbers["success"] * numbers["episodes"]), int(numbers["episodes"])


def read_run(folder: Path, names: Iterable[str] = tuple(CURVES)) -> Run:
    """Read the newest version of a run folder, with the curves of these names."""
    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not files or not (folder / "summary.json").exists():
        raise SystemExit(f"{folder} is no finished run: it needs summary.json and TensorBoard events")
    version = files[-1].parent
    events = EventAccumulator(str(version), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    iteration = {point.step: int(point.value) + 1 for point in events.Scalars("epoch")}
    curves = {
        name: [(iteration[point.step], point.value) for point in events.Scalars(name)] for name in names if name in tags
    }
    first = min((iteration[point.step] for point in events.Scalars("policy/loss")), default=1)
    return Run(
        folder=folder,
        summary=json.loads((folder / "summary.json").read_text()),
        config=yaml.safe_load((version / "config.yaml").read_text()),
        facts=json.loads((version / "run.json").read_text()),
        curves=curves,
        warmup=first - 1,
    )


def difference_interval(after: tuple[int, int], before: tuple[int, int]) -> tuple[float, float, float]:
    """Difference of two independent proportions with its 95 % interval (Newcombe 1998, method 10, of Wilson bounds)."""
    (x1, n1), (x2, n2) = after, before
    p1, p2 = x1 / n1, x2 / n2
    low1, high1 = wilson_interval(x1, n1)
    low2, high2 = wilson_interval(x2, n2)
    low = p1 - p2 - math.hypot(p1 - low1, high2 - p2)
    high = p1 - p2 + math.hypot(high1 - p1, p2 - low2)
    return p1 - p2, low, high


def pooled(runs: Sequence[Run], when: str) -> tuple[int, int]:
    pairs = [run.successes(when) for run in runs]
    return sum(x for x, _ in pairs), sum(n for _, n in pairs)


def mean(runs: Sequence[Run], when: str, key: str) -> float:
    return sum(run.summary[when][key] for run in runs) / len(runs)


def baselines(config: dict[str, Any], episodes: int) -> list[Baseline]:
    """The random agent and the best constant action on the held-out seeds that the runs were judged on."""
    env = config["data"]["init_args"]["env"]
    kwargs = env.get("kwargs") or {}
    seeds = held_out_seeds()[:episodes]
    probe = gymnasium.make(env["id"], disable_env_checker=True, **kwargs)
    names = list(probe.get_wrapper_attr("actions"))
    probe.close()
    constants = [constant_agent(env["id"], name, seeds, **kwargs) for name in names]
    return [random_agent(env["id"], seeds, **kwargs), max(constants, key=lambda result: result.success)]


def plot(runs: Sequence[Run], rivals: Sequence[Baseline], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    last = max(x for run in runs for curve in run.curves.values() for x, _ in curve)
    for axis, (name, label) in zip(axes, CURVES.items(), strict=True):
        axis.axvspan(0.5, runs[0].warmup + 0.5, color="0.92", label="critic warm-up")
        for run, colour in zip(runs, colours, strict=False):
            xs, ys = zip(*run.curves[name], strict=True)
            axis.plot(xs, ys, color=colour, alpha=0.8, label=f"seed {run.seed}")
        axis.set(xlabel="iteration", ylabel=label, xlim=(-0.8, last + 1.8))
        axis.spines[["top", "right"]].set_visible(False)
    for place, (run, colour) in enumerate(zip(runs, colours, strict=False)):
        shift = 0.25 * (place - (len(runs) - 1) / 2)
        for x, when in ((0, "before"), (last + 1, "after")):
            successes, episodes = run.successes(when)
            low, high = wilson_interval(successes, episodes)
            share = successes / episodes
            bars = [[max(share - low, 0.0)], [max(high - share, 0.0)]]  # at 0 and 1 a bound may round past the share
            axes[0].errorbar(x + shift, share, yerr=bars, fmt="o", color=colour, capsize=2, markersize=4)
    for rival, style in zip(rivals, ("--", ":"), strict=True):
        what = "random agent" if rival.agent == "random" else f"always '{rival.agent}'"
        axes[0].axhline(rival.success, color="0.4", linestyle=style, linewidth=1, label=what)
    axes[0].set(ylim=(0, 1.02), title="points: held-out episodes before and after, 95 % interval")
    axes[0].title.set_fontsize(9)
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(runs: Sequence[Run], rivals: Sequence[Baseline], picture: str) -> str:
    model = runs[0].config["model"]["init_args"]["model"]
    env = runs[0].config["data"]["init_args"]["env"]
    episodes = runs[0].successes("after")[1]
    gain, low, high = difference_interval(pooled(runs, "after"), pooled(runs, "before"))
    after, before = (x / n for x, n in (pooled(runs, "after"), pooled(runs, "before")))
    turns = mean(runs, "after", "mean_turns") / mean(runs, "before", "mean_turns") - 1
    lines = [
        "# Quickstart with several seeds",
        "",
        "See how well the quickstart learns.",
        f"Model `{model}`, environment `{env['id']}` with `{env.get('kwargs') or {}}`,",
        f"{runs[0].config['trainer']['max_epochs']} iterations of which {runs[0].warmup} are critic warm-up. "
        f"The policy plays the same {episodes} held-out levels before",
        "and after training, with sampled actions. Written by `benchmarks/quickstart_seeds.py` (`make seeds`).",
        "",
        f"![learning curves]({picture})",
        "",
        "| seed | success before | success after | turns before | turns after | valid before | valid after | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [f"{run.seed}"]
        for when in ("before", "after"):
            x, n = run.successes(when)
            bounds = wilson_interval(x, n)
            cells.append(f"{x / n:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})")
        cells += [f"{run.summary[when]['mean_turns']:.2f}" for when in ("before", "after")]
        cells += [f"{run.summary[when]['valid_action_ratio']:.3f}" for when in ("before", "after")]
        cells.append(f"{run.summary['minutes']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| over all seeds | |",
        "|---|---|",
        f"| success before | {before:.3f} |",
        f"| success after | {after:.3f} |",
        f"| gain in points | {100 * gain:.1f} (95 % interval {100 * low:.1f} to {100 * high:.1f}) |",
        f"| change of mean turns | {100 * turns:+.0f} % |",
        f"| valid actions before, after | {mean(runs, 'before', 'valid_action_ratio'):.3f}, "
        f"{mean(runs, 'after', 'valid_action_ratio'):.3f} |",
        "",
        "| baseline on the same levels | success | mean turns | success after training is higher by |",
        "|---|---|---|---|",
    ]
    for rival in rivals:
        what = "random agent" if rival.agent == "random" else f"best constant action, `{rival.agent}`"
        points = 100 * (after - rival.success)
        lines.append(f"| {what} | {rival.success:.3f} | {rival.mean_turns:.2f} | {points:.1f} points |")
    lines += [
        "",
        "The interval of the gain is Newcombe's for independent samples, although both have the same levels; that of a",
        "seed is Wilson's. The curve counts an episode when it ends, so its first points hold mostly short episodes.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the picture and the table")
    parser.add_argument("--note", default="", help="a sentence on how the runs were made, to end the report")
    chosen = parser.parse_args(arguments)
    runs = sorted((read_run(folder) for folder in chosen.runs), key=lambda run: run.seed)
    rivals = baselines(runs[0].config, runs[0].successes("after")[1])
    plot(runs, rivals, chosen.out / "quickstart.png")
    text = report(runs, rivals, "quickstart.png")
    text += f"\n{chosen.note}\n" if chosen.note else ""
    put(chosen.out / "quickstart.md", "seeds", text)
    print(text)


if __name__ == "__main__":
    main()
