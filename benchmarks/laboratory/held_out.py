"""Ten held-out tasks: what advice on a recipe is judged by. Chosen before any of them was trained on.

They differ in what may matter to the choice: how many turns a reward is away, whether it comes at the end or on the
way, luck in what happens or in what it pays, states that recur or never do, temptations, costs, and lengths of
episodes and of replies. Only the noise of the experts was fitted, so that a cloned start succeeds in 10 to 50 % of its
episodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.laboratory.arms import Arm, agent_of, rollouts
from benchmarks.laboratory.cloning import HEADING, PROMPT, TURNS, cloned, demonstration, thought_words, thoughts
from benchmarks.laboratory.games import WordGame
from benchmarks.laboratory.policy import prompts_of
from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule, ValidationConfig
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.types import ModelInput

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "held_out"
HELD_OUT = ValidationConfig(episodes=128, num_envs=128)


@dataclass(frozen=True)
class Task:
    """A game and the policy that learning in it starts from.

    Args:
        about: how it differs from the others.
        game: name of its class in ``games.py``.
        noise: share of the expert's moves that are random.
        arguments: of the game.
        reply_tokens: words of a reply; all but the last are thoughts.
        steps: of cloning.
    """

    about: str
    game: str
    noise: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reply_tokens: int = 1
    steps: int = 256

    @property
    def env(self) -> EnvConfig:
        return EnvConfig(f"benchmarks.laboratory.games:{self.game}-v0", dict(self.arguments))

    def make(self) -> WordGame:
        """Return the game."""
        return cast(WordGame, gymnasium.make(self.env.id, **self.arguments).unwrapped)

    @property
    def words(self) -> list[str]:
        """All that is read or said."""
        return [*HEADING, *self.make().words, *thought_words(self.reply_tokens)]

    @property
    def expert(self) -> Demonstrations:
        return NoisyPlayer(self)

    @property
    def name(self) -> str:
        """Tells its settings apart."""
        settings = repr((self.game, self.noise, dict(self.arguments), self.reply_tokens, self.steps))
        return f"{self.game.lower()}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"


class NoisyPlayer(Demonstrations):
    """Turns of a game's own player that thinks aloud at random and takes random moves now and then.

    Args:
        task: game and noise.
        turns: to be played.
    """

    def __init__(self, task: Task, turns: int = TURNS) -> None:
        self.task = task
        self.turns = turns

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play; each turn counts as an episode, since order does not matter."""
        task, rng, env = self.task, np.random.default_rng(0), self.task.make()
        texts: list[str] = []
        replies: list[list[str]] = []
        episode = 0
        while len(texts) < self.turns:
            (text, _), over = env.reset(seed=episode), False
            episode += 1
            while not over:
                move = env.moves[rng.integers(len(env.moves))] if rng.random() < task.noise else env.best()
                texts.append(str(text))
                replies.append([*thoughts(task.reply_tokens, rng), move])
                text, _, terminated, truncated, _ = env.step(move)
                over = terminated or truncated
        prompts = prompts_of(tokenizer, texts[: self.turns], PROMPT)
        return [
            demonstration(number, ModelInput.of_ids(prompt), tokenizer, said)
            for number, (prompt, said) in enumerate(zip(prompts, replies, strict=False))
        ]


TASKS: dict[str, Task] = {
    "signal": Task("one turn; luck in what an answer pays", "Signal", 0.8, reply_tokens=2),
    "sorting": Task("6 to 10 turns; every turn costs; certain, states recur", "Sorting", 0.75),
    "safe": Task("6 turns without a mistake, or from the beginning; very sparse", "Safe", 0.65),
    "wind": Task("10 turns; every third step goes elsewhere", "Field", 0.6, {"wind": 0.3}, 4),
    "clutter": Task("12 turns; hardly any text is seen twice", "Field", 0.7, {"width": 11, "clutter": 3, "limit": 30}),
    "road": Task("10 turns to 1, or 0.3 at once; long replies", "Road", 0.35, reply_tokens=8),
    "harvest": Task("rewards on the way, 12 turns to all of them", "Harvest", 0.6),
    "beam": Task("40 turns; a small reward in each, until a fall", "Beam", 0.35),
    "journey": Task("the first of 12 turns decides; luck in all of them", "Journey", 0.8, reply_tokens=2),
    "jobs": Task("3 to 40 turns, few of them many; reward at the end", "Jobs", 0.5, reply_tokens=3),
}


def agent_and_data(task: Task, folder: Path = RUNS) -> tuple[PPOAgent, RolloutDataModule]:
    """Return what a task is learned with: its cloned start, cloned if it is not below the folder yet, and rollouts."""
    model = cloned(task, folder)
    return agent_of(model, Arm(), SeparateCritic()), rollouts(task, Arm(), 0, HELD_OUT)
