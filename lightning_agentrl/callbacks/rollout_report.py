"""Report of a rollout in the logger: episodes as text, histograms, and images if the environment provides them."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from PIL import Image

from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.types import Rollout, Turn

LARGEST = 1e12  # numbers in a histogram are clamped to this absolute value


def log_text(loggers: Sequence[Logger], name: str, text: str, step: int) -> None:
    """Log a text with its line breaks, in a monospaced font."""
    quoted = text.replace("```", "'''")  # TensorBoard reads Markdown
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, f"```\n{quoted}\n```", step)
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, columns=["text"], data=[[text]], step=step)


def log_image(loggers: Sequence[Logger], name: str, image_HWC: np.ndarray, step: int) -> None:
    """Log an image, uint8 [H, W, 3]."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, image_HWC, step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [image_HWC], step=step)


def log_histogram(loggers: Sequence[Logger], name: str, numbers: Sequence[float], step: int) -> None:
    """Log a histogram of the finite numbers, if there are any."""
    numbers = [min(max(x, -LARGEST), LARGEST) for x in numbers if math.isfinite(x)]
    if not numbers:
        return
    # TensorBoard's bins end at 1e20. Weights & Biases divides the range into 64 bins, which fails if the range is a
    # rounding error (0.3 and 0.1 + 0.2), so round the numbers to float32.
    drawn = np.asarray(numbers, dtype=np.float32).astype(np.float64)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, drawn, step)
        elif isinstance(logger, WandbLogger):
            import wandb  # wandb is installed, since its logger requires it

            cast(Any, logger).log_metrics({name: wandb.Histogram(drawn.tolist())}, step=step)


TURNS = 20  # number of last turns of an episode to show
WIDTH = 110  # characters per line
FRAMES = 8  # largest number of images in a filmstrip


class RolloutReport(RolloutCallback):
    """Log readable episodes, histograms and images of rollouts, if the logger supports them.

    The histograms show turns per episode, tokens per reply and reward per turn, over all processes.

    Args:
        episodes: number of episodes of the first process to show as text in each report, finished ones first.
        every: number of iterations from one report to the next.
    """

    def __init__(self, episodes: int = 3, every: int = 1) -> None:
        if episodes < 0 or every < 1:
            raise ValueError(f"RolloutReport needs episodes >= 0 and every >= 1, got {episodes} and {every}")
        self.episodes = episodes
        self.every = every

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if trainer.current_epoch % self.every:
            return
        loggers = trainer.loggers
        step = trainer.global_step + agent.datamodule.steps_per_iteration - 1  # step of the iteration's metrics
        for name, numbers in _distributions(rollout).items():
            everywhere = [x for part in all_gather(numbers) for x in part]
            if trainer.is_global_zero:
                log_histogram(loggers, f"histogram/{name}", everywhere, step)
        if not trainer.is_global_zero:
            return
        for place, turns in enumerate(pick_episodes(rollout.turns, self.episodes)):
            shown = turns[-TURNS:]
            log_text(loggers, f"episode/{place}", episode_text(shown), step)
            if frames := [turn.image for turn in shown if turn.image is not None]:
                log_image(loggers, f"episode/{place}", filmstrip(frames[-FRAMES:]), step)


def _distributions(rollout: Rollout) -> dict[str, list[float]]:
    return {
        "episode_turns": [float(turn.index + 1) for turn in rollout.turns if turn.done],
        "reply_tokens": [float(len(segment)) for sample in rollout.samples for segment in sample.actions],
        "turn_reward": [turn.reward for turn in rollout.turns],
    }


def pick_episodes(turns: Sequence[Turn], count: int) -> list[list[Turn]]:
    """Return the turns of ``count`` episodes: finished before running ones, with solved and failed ones alternating."""
    episodes: dict[tuple[int, int], list[Turn]] = {}
    for turn in turns:
        episodes.setdefault((turn.env, turn.episode), []).append(turn)
    every = list(episodes.values())
    solved = [e for e in every if e[-1].done and e[-1].succeeded]
    failed = [e for e in every if e[-1].done and not e[-1].succeeded]
    shorter = min(len(solved), len(failed))
    alternating = [e for pair in zip(solved, failed, strict=False) for e in pair]
    running = [e for e in every if not e[-1].done]
    return [*alternating, *solved[shorter:], *failed[shorter:], *running][:count]


def episode_text(turns: Sequence[Turn]) -> str:
    """Return an episode as readable text."""
    last = turns[-1]
    end = f"{'solved' if last.succeeded else 'failed'}, {last.stop}" if last.done else "running"
    lines = [
        f"environment {last.env}, episode {last.episode}, turns {turns[0].index} to {last.index}: {end}, "
        f"return {last.episode_return:g}"
    ]
    for turn in turns:
        note = "" if turn.valid else f"   ({_why_invalid(turn)})"
        capped = "   (cut by the token cap)" if turn.hit_token_cap else ""
        lines += [
            f"--- turn {turn.index}",
            *_wrapped(turn.observation),
            *_wrapped(turn.reply, ">> "),
            f"action: {turn.action}   reward: {turn.reward:g}{note}{capped}",
        ]
    return "\n".join(lines)


def _why_invalid(turn: Turn) -> str:
    if turn.parsed_action is not None:
        return "the environment refused it"
    return "the reply names no action, " + ("it is requested again" if turn.asked_again else "the default was taken")


def filmstrip(frames: Sequence[bytes]) -> np.ndarray:
    """Return PNGs side by side as one image [H, W, 3], with smaller images padded with black."""
    images = [np.asarray(Image.open(io.BytesIO(frame)).convert("RGB")) for frame in frames]
    height = max(image.shape[0] for image in images)
    return np.concatenate([np.pad(i, ((0, height - i.shape[0]), (0, 2), (0, 0))) for i in images], axis=1)


def _wrapped(text: str, prefix: str = "") -> list[str]:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    return [prefix + line for line in lines or [""]]
