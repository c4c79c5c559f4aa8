"""A tiny vision-language model learns to cross lakes that it only sees: shown how to for a minute, then by trying.

    python -m benchmarks.vision.grid_world --seed 0      # one seed, at most 20 minutes on two cores
    python -m benchmarks.vision.grid_world --report      # docs/results/vision.md from the seeds there are

A Qwen3-VL of 0.8 M parameters, made here at random, reads a picture of a map of 4 x 4 cells, a token for each cell, and
answers with a direction. It is first shown best moves in random states (cross-entropy), and stopped while it still
fails every other map. PPO goes on from there, with the tower frozen. Played are 200 held-out maps, 16 turns at most,
sampled; also with the picture of another map in place of each, which tells what can be had without seeing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gymnasium
import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger

from benchmarks.intervals import T_QUANTILES
from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.callbacks import CriticWarmup
from lightning_agentrl.models.critic import SeparateCritic, SharedCritic
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from lightning_agentrl.models.packing import pack
from lightning_agentrl.prompts.memory import WindowMemory
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule, TurnInteraction, ValidationConfig
from lightning_agentrl.types import ModelInput, Row
from tests.tiny import tiny_vision_folder

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "vision"
GAME = "agentrl_envs:GridWorldImage-v0"
DISCOUNT = 0.95
ARGUMENTS = {"cell_px": 16, "shaping": DISCOUNT}
SAMPLES, BATCH, RATE = 11_000, 64, 1e-3  # of the warm start
PERIOD = 10  # iterations from one look at held-out maps to the next
EPISODES = 200
FORMAT = PromptFormat(think=False, instruction="", examples=False, system="", max_prompt_tokens=96)


class Shuffled(gymnasium.Wrapper):
    """Shows the picture of another map in each turn."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(gymnasium.make(GAME, disable_env_checker=True, **kwargs))
        self.other = gymnasium.make(GAME, disable_env_checker=True, **kwargs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.draw = np.random.default_rng(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        return self._changed(observation), info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._changed(observation), reward, terminated, truncated, info

    def _changed(self, observation: Any) -> Any:
        shown, _ = self.other.reset(seed=int(self.draw.integers(2**31)))
        return {**observation, "images": shown["images"]}


gymnasium.register("GridWorldShuffled-v0", entry_point=Shuffled)


def states(draw: random.Random) -> Iterator[tuple[np.ndarray, tuple[str, ...]]]:
    """Yield pictures of states and the best moves in them, without end. Held-out maps have other seeds."""
    env = gymnasium.make(GAME, disable_env_checker=True, **ARGUMENTS)
    game = cast(Any, env.unwrapped)
    while True:
        observation, _ = env.reset(seed=draw.randrange(2**31))
        ended = False
        while not ended and (best := game.best_actions()):
            yield observation["images"][0], best
            move = draw.choice([*best, *game.actions])  # often a good one, so that there are states near the goal
            observation, _, terminated, truncated, _ = env.step(move)
            ended = terminated or truncated or draw.random() < 0.3


def warm_start(folder: Path, seed: int) -> float:
    """Train a random model on best moves, and return the seconds that it took."""
    torch.manual_seed(seed)
    tiny_vision_folder(
        folder,
        "qwen3_vl",
        ["up down left right"] * 50,
        seed,
        hidden_size=128,
        layers=3,
        head_dim=32,
        tower_size=64,
        tower_layers=1,
        patch_size=8,
        initializer_range=0.02,
    )
    started = time.monotonic()
    policy = LanguageModel(load_causal_lm(str(folder)))
    tokenizer = load_tokenizer(str(folder))
    chat = ChatRenderer(tokenizer, FORMAT, policy.image_reader)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.01)
    steps = SAMPLES // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    draw = random.Random(seed)
    shown = states(draw)
    replies = {
        name: ModelInput.of_ids([*tokenizer.encode(name, add_special_tokens=False), chat.template.turn_close_id])
        for name in ("up", "down", "left", "right")
    }
    for step in range(steps):
        rows = []
        for picture, best in (next(shown) for _ in range(BATCH)):
            segments = chat.render(Rules(), Observation(images=chat.see([picture]))).segments
            prompt, reply = segments[0].input, replies[draw.choice(best)]
            rows.append(Row(prompt + reply, tuple(range(len(prompt) - 1, len(prompt) + len(reply) - 1))))
        packed = pack(rows, share=False, reader=policy.image_reader)
        loss = -policy.token_scores(policy.hidden(packed), packed.targets, 1.0).logps.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"shown {step * BATCH}: loss {loss.item():.3f}", flush=True)
    policy.lm.save_pretrained(folder)
    return time.monotonic() - started


def data_module(env: str, seed: int) -> RolloutDataModule:
    return RolloutDataModule(
        env=EnvConfig(env, dict(ARGUMENTS), worker="thread"),
        num_envs=64,
        turns_per_env=16,
        mini_batch_turns=256,
        memory=WindowMemory(0),
        prompt=FORMAT,
        interaction=TurnInteraction(max_reply_tokens=6, invalid_penalty=0.3),
        validation=ValidationConfig(episodes=EPISODES, num_envs=50, every=PERIOD),
        seed=seed,
    )


def trainer_for(iterations: int, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=iterations,
        logger=CSVLogger(RUNS / "logs") if callbacks else False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


class Curve(L.Callback):
    """Held-out success at intervals."""

    def __init__(self, minutes: float) -> None:
        self.points: list[tuple[int, float]] = []
        self.ends_at = time.monotonic() + 60 * minutes

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.datamodule.validation_due:  # type: ignore[attr-defined]
            return
        success = float(trainer.callback_metrics["val/success"])
        self.points.append((trainer.current_epoch + 1, success))
        print(f"iteration {trainer.current_epoch + 1}: {success:.3f} of {EPISODES} held-out maps", flush=True)
        if time.monotonic() > self.ends_at:
            trainer.should_stop = True


def held_out(model: str, env: str, seed: int) -> float:
    """Success of a model on held-out maps, sampled."""
    trainer = trainer_for(1)
    trainer.validate(PPOAgent(model, critic=SharedCritic()), data_module(env, seed), verbose=False)
    return float(trainer.callback_metrics["val/success"])


def run(seed: int, iterations: int, minutes: float) -> None:
    """Warm start, then PPO; writes what was seen."""
    folder = RUNS / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    shown = folder / "shown.json"  # a run that was broken off goes on from there
    if shown.exists():
        results: dict[str, Any] = json.loads(shown.read_text())
    else:
        results = {"seed": seed, "warm_start_seconds": warm_start(folder / "shown", seed)}
        results["warm"] = held_out(str(folder / "shown"), GAME, seed)
        results["warm_shuffled"] = held_out(str(folder / "shown"), "GridWorldShuffled-v0", seed)
        results["minutes"] = (time.monotonic() - started) / 60
        shown.write_text(json.dumps(results))
    print(results, flush=True)
    agent = PPOAgent(
        str(folder / "shown"),
        critic=SeparateCritic(),
        advantage=DualDiscountGAE(gamma_step=DISCOUNT, lam_step=0.8),
        optim=Optim(lr_actor=2.5e-4, lr_critic=1e-3, max_grad_norm_actor=0.5),
        kl=KL(reward=0.0),
        entropy_bonus=0.0,
    )
    tried = time.monotonic()
    curve = Curve(minutes)
    trainer = trainer_for(iterations, curve, CriticWarmup(rollouts=2, rounds=3, fraction=1.0))
    trainer.fit(agent, data_module(GAME, seed))
    policy = agent.models.actor
    policy.lm.save_pretrained(folder / "tried")
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja"):
        (folder / "tried" / name).write_bytes((folder / "shown" / name).read_bytes())
    results["curve"] = curve.points
    results["trained"] = held_out(str(folder / "tried"), GAME, seed)
    results["trained_shuffled"] = held_out(str(folder / "tried"), "GridWorldShuffled-v0", seed)
    results["minutes"] = results["minutes"] + (time.monotonic() - tried) / 60
    (folder / "told.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


TEXT = """\
# Learning from pictures

A Qwen3-VL of 0.8 M parameters with random weights learns to cross lakes of 4 x 4 cells with 2 to 4 holes
(`GridWorldImage-v0`). Each turn shows it only a picture of 64 x 64 pixels, with one token for each cell. The warm start
clones the best moves in {samples:,} states; then PPO trains the language part, with the tower frozen. The table shows
success on {episodes} held-out maps, with at most 16 turns and sampled actions. In the columns *shuffled*, each picture
is replaced by that of another map. Written by `benchmarks/vision/grid_world.py`.

{table}

PPO adds {gain:.1f} points (mean of {seeds} seeds, 95 % interval {low:.1f} to {high:.1f}).

![success by iteration](vision.png)
"""


def report() -> None:
    """Write the page from the seeds that were run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    seeds = [json.loads(path.read_text()) for path in sorted(RUNS.glob("seed*/told.json"))]
    rows = ["| seed | after the warm start | shuffled | after PPO | shuffled | minutes |", "|---|---|---|---|---|---|"]
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for one in seeds:
        numbers = " | ".join(f"{one[name]:.3f}" for name in ("warm", "warm_shuffled", "trained", "trained_shuffled"))
        rows.append(f"| {one['seed']} | {numbers} | {one['minutes']:.1f} |")
        points = [(0, one["warm"]), *one["curve"]]
        axis.plot(*zip(*points, strict=True), marker=".", label=f"seed {one['seed']}")
    blind = float(np.mean([one["trained_shuffled"] for one in seeds]))
    axis.axhline(blind, color="grey", linestyle=":", label="shuffled pictures")
    axis.set(xlabel="iteration", ylabel="success on held-out maps", ylim=(0, 1))
    axis.legend()
    results = ROOT / "docs" / "results"
    figure.savefig(results / "vision.png", dpi=150)
    gains = [100 * (one["trained"] - one["warm"]) for one in seeds]
    mean, spread = float(np.mean(gains)), float(np.std(gains, ddof=1)) if len(gains) > 1 else math.nan
    half = T_QUANTILES[len(gains) - 2] * spread / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    text = TEXT.format(
        samples=SAMPLES,
        episodes=EPISODES,
        table="\n".join(rows),
        gain=mean,
        seeds=len(seeds),
        low=mean - half,
        high=mean + half,
    )
    (results / "vision.md").write_text(text)
    (results / "vision.json").write_text(json.dumps(seeds, indent=1) + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny vision-language model learns to cross lakes that it sees.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=72)
    parser.add_argument("--minutes", type=float, default=10.0, help="of PPO, to the next look at held-out maps")
    parser.add_argument("--report", action="store_true", help="write the page from the seeds there are")
    given = parser.parse_args()
    if given.report:
        report()
    else:
        run(given.seed, given.iterations, given.minutes)


if __name__ == "__main__":
    main()
