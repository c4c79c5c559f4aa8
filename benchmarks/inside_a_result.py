"""What values, advantages and the KL do to one behaviour over the iterations of a run: the pictures of a guide.

    .venv/bin/python benchmarks/inside_a_result.py    # a minute or two on two cores

A word model of two layers learns a game of four places, with three weights of the KL and three seeds. All is read from
the turn log. Prints the numbers that `docs/guides/inside_a_result.md` quotes, and writes its pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import gymnasium
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl_envs import TextEnv
from lightning_agentrl import PPOAgent, RolloutDataModule, Trainer
from lightning_agentrl.callbacks import TurnLog
from lightning_agentrl.models.words import word_model

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("gate", "fence", "brook", "hill")
SMALL, LARGE = 0.3, 1.0  # what is picked on the way, and what lies behind the last place
TOLD = "fence"  # the place that the guide follows
WEIGHTS = (0.0, 0.05, 0.5)
SEEDS = (0, 1, 2)
ITERATIONS = 30


class Orchard(TextEnv):
    """Four places in a row: a few apples at each, a whole tree behind the last."""

    actions: ClassVar = {"pick": "pick what is here and go home", "walk": "walk to the next place", "leave": "go home"}
    default_action = "leave"
    max_turns = len(PLACES)

    @property
    def system_prompt(self) -> str:
        return ""

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.place = 0

    def _act(self, action: str) -> tuple[float, bool]:
        if action != "walk":
            return SMALL * (action == "pick"), True
        if self.place == len(PLACES) - 1:
            return LARGE, True
        self.place += 1
        return 0.0, False

    def _observe(self) -> tuple[str, str]:
        return PLACES[self.place], ""


gymnasium.register("Orchard-v0", Orchard)


def train(folder: Path, kl: float, seed: int, iterations: int) -> list[dict[str, Any]]:
    """Train one run; the turns that it was trained on."""
    model = word_model(PLACES, folder / "model", seed, phrases=list(Orchard.actions))
    agent = PPOAgent(
        str(model),
        critic={"class_path": "SeparateCritic"},  # type: ignore[arg-type]
        advantage={"class_path": "GAE", "init_args": {"gamma": 1.0, "lam": 0.9, "whiten": False}},  # type: ignore[arg-type]
        kl={"reward": kl},  # type: ignore[arg-type]
        optim={"lr_actor": 1e-3, "lr_critic": 3e-3},  # type: ignore[arg-type]
    )
    data = RolloutDataModule(
        env={"id": "Orchard-v0"},  # type: ignore[arg-type]
        num_envs=64,
        turns_per_env=2,
        mini_batch_turns=64,
        memory={"class_path": "WindowMemory", "init_args": {"turns": 0}},  # type: ignore[arg-type]
        prompt={"think": False, "instruction": "", "system": "", "max_prompt_tokens": 64},  # type: ignore[arg-type]
        interaction={  # type: ignore[arg-type]
            "class_path": "TurnInteraction",
            "init_args": {"max_reply_tokens": 1, "invalid_penalty": 0.0, "invalid_mode": "replace"},
        },
        validation={"episodes": 0},  # type: ignore[arg-type]
        seed=seed,
    )
    trainer = Trainer(
        max_epochs=iterations,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        callbacks=[TurnLog()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent, data)
    files = sorted((folder / "turns").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Seen:
    """What the log says of one place, by iteration; NaN where nothing was seen."""

    walks: np.ndarray  # share of the turns
    value: np.ndarray
    of_walking: np.ndarray  # mean advantage
    of_picking: np.ndarray
    kl: np.ndarray  # of the policy to the initial one, nats


def seen(turns: Sequence[dict[str, Any]], place: str, iterations: int) -> Seen:
    """Average what was logged at a place in each iteration."""
    rows: dict[str, list[float]] = {name: [] for name in Seen.__dataclass_fields__}
    for iteration in range(1, iterations + 1):
        here = [turn for turn in turns if turn["iteration"] == iteration and turn["observation"] == place]
        rows["walks"].append(mean(turn["action"] == "walk" for turn in here))
        rows["value"].append(mean(turn["values"][0] for turn in here))
        for name, action in (("of_walking", "walk"), ("of_picking", "pick")):
            rows[name].append(mean(turn["advantages"][0] for turn in here if turn["action"] == action))
        known = [turn for turn in here if turn["ref_logps"]]
        rows["kl"].append(mean(turn["old_logps"][0] - turn["ref_logps"][0] for turn in known))
    return Seen(**{name: np.array(row) for name, row in rows.items()})


def mean(numbers: Iterable[float]) -> float:
    return float(np.mean(list(numbers) or [np.nan]))


def smooth(row: np.ndarray, width: int = 3) -> np.ndarray:
    """Average over neighbouring iterations, since a place may be seen by few turns."""
    padded = np.pad(row, width // 2, constant_values=np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing was seen in any of them
        return np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def picture_of_one(turns: Sequence[dict[str, Any]], iterations: int, file: Path) -> None:
    """Draw one run: what is done where, what it is worth, and which action is better than that."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    x = np.arange(1, iterations + 1)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(PLACES)))
    for place, colour in zip(PLACES, colours, strict=True):
        here = seen(turns, place, iterations)
        axes[0].plot(x, smooth(here.walks), color=colour, label=place)
        axes[1].plot(x, smooth(here.value), color=colour, label=place)
    there = seen(turns, TOLD, iterations)
    axes[2].plot(x, smooth(there.of_walking), color="tab:green", label="walk")
    axes[2].plot(x, smooth(there.of_picking), color="tab:red", label="pick")
    axes[2].axhline(0, color="grey", linewidth=0.8)
    axes[1].axhline(SMALL, color="grey", linewidth=0.8, linestyle=":")
    titles = ("share of turns that walk on", "value of being there", f"mean advantage at the {TOLD}")
    _finish(figure, axes, titles, file)


def picture_of_weights(runs: dict[float, list[list[dict[str, Any]]]], iterations: int, file: Path) -> None:
    """Draw what is done at the first place: a panel for each seed, a line for each weight of the KL."""
    count = len(next(iter(runs.values())))
    figure, axes = plt.subplots(1, count, figsize=(3.7 * count, 3.2), squeeze=False)
    x = np.arange(1, iterations + 1)
    for number, (weight, seeds) in enumerate(runs.items()):
        for axis, turns in zip(axes[0], seeds, strict=True):
            walks = smooth(seen(turns, PLACES[0], iterations).walks)
            axis.plot(x, walks, color=f"C{number}", label=f"weight {weight:g}")
            axis.set_ylim(-0.03, 1.03)
    _finish(figure, axes[0], [f"walks on at the {PLACES[0]}, seed {seed}" for seed in range(count)], file)


def _finish(figure: Any, axes: Sequence[Any], titles: Sequence[str], file: Path) -> None:
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="iteration")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[float, list[list[dict[str, Any]]]]:
    """Train all runs; print and draw what happened. Returns the turns of each seed by the weight of the KL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "guides", help="folder of the pictures")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    wanted = parser.parse_args(arguments)
    runs: dict[float, list[list[dict[str, Any]]]] = {}
    for weight in WEIGHTS:
        runs[weight] = []
        for seed in wanted.seeds:
            with TemporaryDirectory() as folder:
                runs[weight].append(train(Path(folder), weight, seed, wanted.iterations))
            print(f"weight {weight:g}, seed {seed}")
            for place in PLACES:
                numbers = seen(runs[weight][-1], place, wanted.iterations)
                for name in Seen.__dataclass_fields__:
                    row = " ".join(f"{x:6.2f}" for x in smooth(getattr(numbers, name))[::4])
                    print(f"  {place:6} {name:10} {row}", flush=True)
    picture_of_one(runs[WEIGHTS[0]][0], wanted.iterations, wanted.out / "inside_a_result.png")
    picture_of_weights(runs, wanted.iterations, wanted.out / "inside_a_result_kl.png")
    return runs


if __name__ == "__main__":
    main()
