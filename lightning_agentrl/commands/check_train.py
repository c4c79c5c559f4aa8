"""`agentrl check-env --train`: test whether the return of a small policy rises above that of random replies."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L

from lightning_agentrl.advantages import GAE
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.words import word_model
from lightning_agentrl.prompts.parser import ActionParser, RawParser
from lightning_agentrl.rollout import (
    EnvConfig,
    PromptFormat,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.types import Rollout

SEEDS = (0, 1, 2)
ITERATIONS = 30
NUM_ENVS, TURNS_PER_ENV, MINI_BATCHES, UPDATE_EPOCHS = 16, 12, 2, 2  # sizes of an iteration
LONGEST = 1024  # largest number of prompt tokens for the small model
MOST_REPLIES = 60
ENTROPY_BONUS = 0.01
POINTS = 10  # points of the mean curve in the plot
_STUDENT = 4.303  # t-value of a 95 % interval with three seeds


@dataclass(frozen=True)
class Texts:
    """Texts of an environment that a small model needs.

    Args:
        words: all words of the environment's texts, the vocabulary.
        replies: replies that the environment accepts.
        named: whether the replies are named actions.
        system: system text for `PromptFormat`; None: the environment's system text.
        longest: number of words in the longest prompt.
    """

    words: Sequence[str]
    replies: Sequence[str]
    named: bool
    system: str | None
    longest: int


class _Curve(RolloutCallback):
    """Record the mean return of the episodes that end in each iteration, or repeat the last mean if no episode ends.

    Returns are sums of the environment's rewards, as in the control with random replies.
    """

    def __init__(self) -> None:
        self.means: list[float] = []
        self._running: dict[tuple[int, int], float] = {}

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        ended = []
        for turn in rollout.turns:
            episode = turn.env, turn.episode
            self._running[episode] = self._running.get(episode, 0.0) + turn.env_reward
            if turn.done:
                ended.append(self._running.pop(episode))
        self.means.append(statistics.fmean(ended) if ended else self.means[-1] if self.means else 0.0)


def train(
    env_id: str, kwargs: Mapping[str, Any], texts: Texts, returns: Sequence[float], iterations: int = ITERATIONS
) -> dict[str, Any]:
    """Train with three seeds and test whether the returns of the last quarter are above the returns of random replies.

    Args:
        env_id: id of the environment for ``gymnasium.make``.
        kwargs: arguments of the environment.
        texts: texts of the environment.
        returns: returns of episodes with random replies, the control.
        iterations: number of iterations of each run.

    Returns:
        Curves by seed, points of the mean curve with intervals, the intervals of the control and of the last quarter,
        the verdict, and a sentence.
    """
    control = interval(returns, 2.0)
    if texts.longest > LONGEST or not texts.replies:
        why = "no replies are known" if not texts.replies else f"prompts have up to {texts.longest} words"
        nothing: dict[str, Any] = {"curves": [], "points": []}
        return {"verdict": "not tried", "said": f"not tried: {why}", "random": control, "last": control, **nothing}
    started = time.perf_counter()
    curves = []
    for seed in SEEDS:
        curves.append(_run(env_id, kwargs, texts, seed, iterations))
        climb = f"seed {seed}: a return of {curves[-1][0]:.3g} at the start, {curves[-1][-1]:.3g} at the end"
        print(f"training: {climb}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    last = interval([statistics.fmean(curve[-max(iterations // 4, 1) :]) for curve in curves], _STUDENT)
    verdict = "climbs" if last["low"] > control["high"] else "not seen"
    turns = iterations * NUM_ENVS * TURNS_PER_ENV
    trained, random = ("{mean:.3g} ({low:.3g} to {high:.3g})".format(**one) for one in (last, control))
    said = f"{verdict}: a return of {trained} in the last quarter of {turns} turns over three seeds, random {random}"
    return {
        "verdict": verdict,
        "said": said,
        "curves": curves,
        "points": points(curves),
        "random": control,
        "last": last,
        "seconds": time.perf_counter() - started,
    }


def points(curves: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Return means over all seeds and a few iterations at a time, each with a 95 % interval.

    Args:
        curves: curves of three seeds, one value per iteration.

    Returns:
        For each point, the number of the point's last iteration, and the mean with the bounds of its interval.
    """
    length = len(curves[0])
    ends = [round((number + 1) * length / min(POINTS, length)) for number in range(min(POINTS, length))]
    return [
        {"iteration": end, **interval([statistics.fmean(curve[begin:end]) for curve in curves], _STUDENT)}
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def interval(values: Sequence[float], width: float) -> dict[str, float]:
    """Return the mean of values, and the interval of ``width`` standard errors to each side of the mean."""
    mean = statistics.fmean(values)
    half = width * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _run(env_id: str, kwargs: Mapping[str, Any], texts: Texts, seed: int, iterations: int) -> list[float]:
    parser: ActionParser | None = None if texts.named else RawParser()
    positions = texts.longest + 64
    curve = _Curve()
    with TemporaryDirectory() as folder:
        model = word_model(texts.words, Path(folder, "model"), seed, texts.replies[:MOST_REPLIES], positions)
        agent = PPOAgent(
            str(model),
            critic=SeparateCritic(),
            advantage=GAE(gamma=0.95, lam=0.95),
            kl=KL(reward=0.0),
            entropy_bonus=ENTROPY_BONUS,
            optim=Optim(lr_actor=3e-3, lr_critic=3e-3),
        )
        data = RolloutDataModule(
            env=EnvConfig(env_id, dict(kwargs)),
            num_envs=NUM_ENVS,
            turns_per_env=TURNS_PER_ENV,
            mini_batch_turns=NUM_ENVS * TURNS_PER_ENV // MINI_BATCHES,
            update_epochs=UPDATE_EPOCHS,
            memory=WindowMemory(0),
            prompt=PromptFormat(
                think=False,
                instruction="",
                system=texts.system,
                examples=False,
                max_prompt_tokens=positions - 1,
            ),
            interaction=TurnInteraction(1, parser, invalid_penalty=0.0),
            validation=ValidationConfig(episodes=0),
            seed=seed,
        )
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=iterations,
            callbacks=[curve],
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        trainer.fit(agent, data)
    return curve.means
