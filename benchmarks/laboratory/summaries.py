"""Summaries in a T-maze: whether a policy learns to carry a sign through them that its window has long lost.

    python -m benchmarks.laboratory.summaries

The junction comes 20 turns after the sign, prompts show 3 turns, and each third turn is followed by a summary. The
policy begins as a clone of an expert that is confused now and then; it is trained with its summaries in later prompts,
and with masked ones.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.laboratory.cloning import HEADING, cloned, demonstration
from benchmarks.laboratory.fits import data_of, quiet, quiet_trainer
from benchmarks.laboratory.policy import LastWord
from benchmarks.laboratory.t_maze import ACTIONS, SIDES, Corridors
from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents import KL, Optim, PPOAgent
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.episode import SUMMARY, Episode, make_prompt
from lightning_agentrl.prompts.memory import PastTurn, WindowMemory
from lightning_agentrl.prompts.messages import Observation, PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout import EnvConfig, GroupRollout, RolloutDataModule, SummaryInteraction, ValidationConfig
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.types import Rollout

QUESTION = "Summarize"
WORDING = PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=96)
WINDOW = 3
TURNS = 6144  # demonstrated
EPISODES, GROUP = 64, 8
LAST = 4  # iterations that success is measured in: 256 episodes


@dataclass(frozen=True)
class SummaryStart:
    """The maze, and the expert that the policy is cloned from.

    Args:
        delay: see :class:`Corridors`.
        confusion: probability that a summary, or a turn at the junction, names a random side.
        steps: of cloning.
    """

    delay: int = 20
    confusion: float = 0.15
    steps: int = 384
    reply_tokens: int = 1

    @property
    def rules(self) -> Corridors:
        return Corridors(self.delay, 1)

    @property
    def env(self) -> EnvConfig:
        return EnvConfig("benchmarks.laboratory.t_maze:TMaze-v0", {"delay": self.delay, "count": 1})

    @property
    def words(self) -> list[str]:
        """All that is read or said."""
        places = [f"place{place}" for place in range(self.delay + 2)]
        return [*HEADING, QUESTION, *SUMMARY.removesuffix(":").split(), *places, *ACTIONS]

    @property
    def expert(self) -> Demonstrations:
        return SummarizingExpert(self)

    @property
    def name(self) -> str:
        """Tells its settings apart."""
        return f"summaries-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"


class SummarizingExpert(Demonstrations):
    """Turns of an expert that repeats the side in its summaries, and is confused now and then."""

    def __init__(self, start: SummaryStart) -> None:
        self.start = start

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play; each turn counts as an episode, since order does not matter."""
        rules, rng, memory = self.start.rules, np.random.default_rng(0), WindowMemory(WINDOW)
        renderer, found = ChatRenderer(tokenizer, WORDING), []
        asked = Observation(QUESTION, messages=(("user", (QUESTION,)),), instruction="")
        while len(found) < TURNS:
            signs = rules.signs[rng.integers(len(rules.signs))]
            episode, side = Episode(0, 0), signs[0]

            def say(episode: Episode, shown: Observation, word: str) -> None:
                prompt = make_prompt(episode, shown, Contract(), renderer, memory)
                found.append(demonstration(len(found), prompt.input, tokenizer, [word]))

            for turn in range(rules.turns):
                if turn and turn % WINDOW == 0:
                    side = self._perhaps(side, rng)
                    say(episode, asked, side)
                    episode.summary, episode.summarized = side, turn
                    episode.summaries += 1
                text = rules.words(turn, signs)
                action = self._perhaps(side, rng) if rules.at_junction(turn) else rules.right(turn, signs)
                say(episode, Observation(text), action)
                episode.past.append(PastTurn(text, "", action))
        return found[:TURNS]

    def _perhaps(self, side: str, rng: np.random.Generator) -> str:
        return SIDES[rng.integers(2)] if rng.random() < self.start.confusion else side


class Masked(SummaryInteraction):
    """Summaries that no later prompt shows."""

    def shown(self, reply: str) -> str:
        return ""


class Successes(RolloutCallback):
    """Notes the share of episodes that succeed, by iteration."""

    def __init__(self) -> None:
        self.curve: list[float] = []

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        self.curve.append(float(np.mean([bool(turn.success) for turn in rollout.turns if turn.done])))


def train(start: SummaryStart, model: Path, masked: bool, iterations: int, seed: int) -> list[float]:
    """Return the success of each iteration, before its update."""
    kind = Masked if masked else SummaryInteraction
    interaction = kind(WINDOW, QUESTION, max_reply_tokens=start.reply_tokens, parser=LastWord(), invalid_penalty=0.0)
    data = data_of(
        start.env,
        WORDING,
        interaction,
        seed,
        num_envs=EPISODES,
        memory=WindowMemory(WINDOW),
        engine=TransformersEngine(max_batch=EPISODES),
        validation=ValidationConfig(episodes=0, num_envs=1),
        groups=GroupRollout(GROUP, EPISODES // GROUP, 4),
    )
    agent = PPOAgent(
        str(model), advantage=GRPO(), kl=KL(reward=0.0, loss=0.0), entropy_bonus=0.0, optim=Optim(lr_actor=1e-3)
    )
    successes = Successes()
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(Path(folder), iterations, [successes]).fit(agent, data)
    return successes.curve


def main() -> None:
    """Print success before and after, with the summaries and with masked ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path("runs/laboratory"), help="for the cloned model")
    given = parser.parse_args()
    quiet()
    start = SummaryStart()
    model = cloned(start, given.folder)
    print("| summaries | seed | first iteration | last 4 iterations | CPU s |\n|---|---|---|---|---|")
    for masked in (False, True):
        for seed in range(given.seeds):
            began = time.process_time()
            curve = train(start, model, masked, given.iterations, seed)
            name, seconds = "masked" if masked else "shown", time.process_time() - began
            print(f"| {name} | {seed} | {curve[0]:.3f} | {np.mean(curve[-LAST:]):.3f} | {seconds:.0f} |", flush=True)
            print(f"<!-- {np.round(curve, 2).tolist()} -->", flush=True)


if __name__ == "__main__":
    main()
