"""The model that every arm of a cell starts from: random words, then cloned from an expert that often errs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import lightning as L
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.laboratory.exact import Array, tables
from benchmarks.laboratory.fits import data_of, quiet_trainer
from benchmarks.laboratory.key_door import ACTIONS, MOVES, ROWS, Rules
from benchmarks.laboratory.policy import LastWord, PolicyReader, Reader, prompt_ids
from lightning_agentrl.agents import CloneAgent, Optim
from lightning_agentrl.agents.optim import Schedule, Schedules
from lightning_agentrl.callbacks import PolicyFolder
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.models.words import word_model
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.rollout import EnvConfig, PromptFormat, RolloutDataModule, TurnInteraction
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.types import ModelInput, Sample, Segment, SegmentKind, StopReason, Turn

HEADING = ("Observation", ":")  # words of the renderer
LETTERS = "abcd"  # a thought is one of them and the number of its place, so that nobody has to count
NO_ACTION = "none"  # last word of a demonstrated reply that names no action
PROMPT = PromptFormat(instruction="", system="", examples=False, max_prompt_tokens=96)
TURNS = 8192  # demonstrated
ROWS_PER_STEP = 256


class Beginning(Protocol):
    """A game and the policy that learning in it starts from."""

    @property
    def env(self) -> EnvConfig: ...

    @property
    def words(self) -> Sequence[str]:
        """All that is read or said."""

    @property
    def reply_tokens(self) -> int:
        """Words of a reply; all but the last are thoughts."""

    @property
    def steps(self) -> int:
        """Of cloning."""

    @property
    def expert(self) -> Demonstrations:
        """Whom the policy is cloned from."""

    @property
    def name(self) -> str:
        """Tells its settings apart."""


class Solved(Beginning, Protocol):
    """One with a game in which the success of a policy can be computed."""

    @property
    def about(self) -> str:
        """The setting in words."""

    @property
    def expert_success(self) -> float: ...

    def reader(self, folder: Path, memory: Memory) -> Reader:
        """Return what reads a policy of the model in a folder, which is shown the past by a memory."""

    def success(self, table: Array) -> float:
        """Return the probability of success of a policy as it was read."""


@dataclass(frozen=True)
class Start:
    """Key and door, and the policy that learning in it starts from.

    Args:
        horizon: see :class:`Rules`.
        slip: see :class:`Rules`.
        lure: see :class:`Rules`.
        reply_tokens: words of a reply; all but the last are thoughts.
        noise: share of the expert's moves that are random.
        invalid: share of its replies that name no action.
        steps: of cloning.
    """

    horizon: int = 12
    slip: float = 0.0
    lure: float = 0.0
    reply_tokens: int = 1
    noise: float = 0.55
    invalid: float = 0.0
    steps: int = 512

    @property
    def rules(self) -> Rules:
        return Rules(self.horizon, self.slip, self.lure)

    @property
    def env(self) -> EnvConfig:
        arguments = {"horizon": self.horizon, "slip": self.slip, "lure": self.lure}
        return EnvConfig("benchmarks.laboratory.key_door:KeyDoor-v0", arguments)

    @property
    def words(self) -> list[str]:
        """All that is read or said."""
        rows = range(ROWS)
        places = [f"x{x}" for x in range(self.rules.width)] + [f"{letter}{row}" for letter in "ykg" for row in rows]
        return [*HEADING, "key", "none", *places, *MOVES, *thought_words(self.reply_tokens)]

    @property
    def expert(self) -> Demonstrations:
        return NoisyExpert(self)

    @property
    def name(self) -> str:
        """Tells its settings apart."""
        return f"start-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"

    @property
    def about(self) -> str:
        """The setting in words."""
        extras = [f"lure {self.lure:g}"] * bool(self.lure) + [f"slip {self.slip:g}"] * bool(self.slip)
        extras += [f"{self.invalid:.0%} of the demonstrated replies without an action"] * bool(self.invalid)
        words = f"replies of {self.reply_tokens} word{'s' * (self.reply_tokens > 1)}"
        return ", ".join([f"horizon {self.horizon}", words, *extras])

    @property
    def expert_success(self) -> float:
        game = tables(self.rules)
        return game.success(game.expert(self.noise))

    def reader(self, folder: Path, memory: Memory) -> PolicyReader:
        """Return what reads a policy, which needs no memory: a prompt tells the whole state."""
        if memory.longest != 0:
            raise ValueError("a policy in key and door is read without its past; leave out history and thoughts")
        return PolicyReader(folder, tables(self.rules).states, PROMPT, self.reply_tokens)

    def success(self, table_SA: Array) -> float:
        """Return the probability of reaching the goal within the limit of an episode."""
        return tables(self.rules).success(table_SA)


def thought_words(reply_tokens: int) -> list[str]:
    """Return all words of thoughts in replies of so many words."""
    return [f"{letter}{place}" for place in range(reply_tokens - 1) for letter in LETTERS]


def thoughts(reply_tokens: int, rng: np.random.Generator) -> list[str]:
    """Return the words before the last one of a reply, at random."""
    return [f"{LETTERS[rng.integers(len(LETTERS))]}{place}" for place in range(reply_tokens - 1)]


def random_model(start: Beginning, folder: Path) -> Path:
    """Write a random model that begins near equal chances for all words, as cloning wants it."""
    word_model(start.words, folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.02
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class NoisyExpert(Demonstrations):
    """Turns of an expert that thinks aloud at random and takes random moves now and then.

    Args:
        start: game and noise.
        turns: to be played.
    """

    def __init__(self, start: Start, turns: int = TURNS) -> None:
        self.start = start
        self.turns = turns

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play by the tables of the game; each turn counts as an episode, since order does not matter."""
        start, rng = self.start, np.random.default_rng(0)
        game = tables(start.rules)
        prompts = [ModelInput.of_ids(ids) for ids in prompt_ids(tokenizer, game.states, PROMPT).tolist()]
        expert_SA = game.expert(start.noise)
        found: list[Demonstration] = []
        while len(found) < self.turns:
            here = int(rng.choice(len(game.states), p=game.start_S))
            for _ in range(start.rules.max_turns):
                action = int(rng.choice(len(ACTIONS), p=expert_SA[here]))
                word = NO_ACTION if rng.random() < start.invalid else ACTIONS[action]
                said = [*thoughts(start.reply_tokens, rng), word]
                found.append(demonstration(len(found), prompts[here], tokenizer, said))
                chances_S = game.next_SAS[here, action]
                if rng.random() >= chances_S.sum():
                    break
                here = int(rng.choice(len(game.states), p=chances_S / chances_S.sum()))
        return found[: self.turns]


def demonstration(
    number: int, prompt: ModelInput, tokenizer: PreTrainedTokenizerBase, words: Sequence[str]
) -> Demonstration:
    """Return a turn as an episode of its own, whose reply has these words."""
    ids = tuple(tokenizer.convert_tokens_to_ids(list(words)))
    turn = Turn(
        env=0,
        episode=number,
        index=0,
        observation="",
        reply=" ".join(words),
        thought=" ".join(words[:-1]),
        action=words[-1],
        valid=True,  # cloned even where it names no action
        env_reward=0.0,
        reward=0.0,
        episode_return=0.0,
        terminated=True,
        truncated=False,
        stop=StopReason.ENV_DONE,
        success=None,
        hit_token_cap=True,
        history_cuts=0,
        policy_version=0,
        env_seconds=0.0,
        engine_seconds=0.0,
        thought_tokens=len(words) - 1,
    )
    reply = Segment(SegmentKind.ACTION, ModelInput.of_ids(ids), (0.0,) * len(ids))
    return Demonstration((Sample((Segment(SegmentKind.PROMPT, prompt), reply), (turn,)),))


def cloned(start: Beginning, folder: Path) -> Path:
    """Return the folder of the model that a game is started with; clone it if it is not below ``folder`` yet."""
    path = folder / start.name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    data = data_of(
        start.env,
        PROMPT,
        TurnInteraction(start.reply_tokens, LastWord()),
        seed=0,
        num_envs=ROWS_PER_STEP,
        turns_per_env=8,
        mini_batch_turns=ROWS_PER_STEP,
        engine=TransformersEngine(ROWS_PER_STEP),
    )
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        model = random_model(start, Path(draft) / "random")
        optim = Optim(lr_actor=4e-3, schedule=Schedules(actor=Schedule("linear")))
        agent = CloneAgent(str(model), start.expert, action_share=0.5, optim=optim)
        epochs = max(start.steps // data.steps_per_iteration, 1)
        L.seed_everything(0, verbose=False)
        quiet_trainer(Path(draft), epochs, [PolicyFolder(f"{draft}/cloned")]).fit(agent, data)
        try:
            Path(f"{draft}/cloned").rename(path)
        except OSError:
            if not path.exists():  # else another process was faster, with the same weights
                raise
    return path
