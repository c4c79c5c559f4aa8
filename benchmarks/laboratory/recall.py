"""A policy in T-maze that reads some of its past: whom it is cloned from, and what it does, computed without episodes.

P episodes there are, T turns of each, N prompts that differ, V words, K thoughts that a prompt can show, A actions of
:data:`ACTIONS` and, last, none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.laboratory.cloning import HEADING, PROMPT, TURNS, demonstration
from benchmarks.laboratory.exact import Array
from benchmarks.laboratory.memories import memory_of
from benchmarks.laboratory.policy import LastWord
from benchmarks.laboratory.t_maze import ACTIONS, SIDES, Corridors
from lightning_agentrl.prompts.memory import Memory, PastTurn
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations
from lightning_agentrl.types import ModelInput

PAST_REPLY = ("THINK", "ACTION")  # words of the renderer
NOTE = ("Your", "last", "actions", ",", "oldest", "first")  # words of ActionsOnlyMemory
WINDOWS = tuple(memory_of("window", turns, thoughts) for turns in (1, 2, 4, 8) for thoughts in (0, 1))
MEMORIES = {"windows": WINDOWS, "every": (*WINDOWS, memory_of("actions", 8), memory_of("cleared", 8))}


@dataclass(frozen=True)
class MazeStart:
    """T-maze, and the policy that learning in it starts from: it reads any past, and hardly uses it.

    Args:
        delay: see :class:`Corridors`.
        corridors: see :class:`Corridors`.
        noise: share of the expert's turns at junctions that are random.
        confusion: probability that it thinks of a random side from a turn on.
        steps: of cloning.
        memories: that the prompts of the expert are made with: windows, or those without observations and the cleared
            ones, too.
    """

    delay: int = 3
    corridors: int = 2
    noise: float = 0.8
    confusion: float = 0.3
    steps: int = 512
    memories: Literal["windows", "every"] = "windows"

    @property
    def rules(self) -> Corridors:
        return Corridors(self.delay, self.corridors)

    @property
    def env(self) -> EnvConfig:
        arguments = {"delay": self.delay, "count": self.corridors}
        return EnvConfig("benchmarks.laboratory.t_maze:TMaze-v0", arguments)

    @property
    def words(self) -> list[str]:
        """All that is read or said."""
        places = [f"place{place}" for place in range(self.delay + 2)]
        return [*HEADING, *PAST_REPLY, *places, *ACTIONS, *(NOTE if self.memories == "every" else ())]

    @property
    def reply_tokens(self) -> int:
        """Words of a reply: a thought, which may carry the side to the next turn, and the action."""
        return 2

    @property
    def expert(self) -> Demonstrations:
        return ConfusedExpert(self)

    @property
    def name(self) -> str:
        """Tells its settings apart."""
        return f"maze-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"

    @property
    def about(self) -> str:
        """The setting in words."""
        return (
            f"T-maze, {self.corridors} corridors with {self.delay + 1} turns from the sign to the junction, replies of "
            f"{self.reply_tokens} words, an expert that gets confused in {self.confusion:.0%} of its turns"
        )

    @property
    def expert_success(self) -> float:
        unconfused = (1 - self.confusion) ** (self.delay + 2)
        return (0.5 + 0.5 * unconfused * (1 - self.noise)) ** self.corridors

    def reader(self, folder: Path, memory: Memory) -> MazeReader:
        """Return what reads a policy with a memory."""
        return MazeReader(folder, self.rules, memory)

    def success(self, table_TA: Array) -> float:
        """Return the probability of passing all junctions.

        Args:
            table_TA: as :meth:`MazeReader.table` returns it.
        """
        table_PTA = table_TA.reshape(-1, self.rules.turns, len(ACTIONS) + 1)
        junctions = [turn for turn in range(self.rules.turns) if self.rules.at_junction(turn)]
        passed = [
            [table_TA[turn, ACTIONS.index(self.rules.right(turn, signs))] for turn in junctions]
            for table_TA, signs in zip(table_PTA, self.rules.signs, strict=True)
        ]
        return float(np.prod(passed, axis=1).mean())


def prompt_of(renderer: ChatRenderer, memory: Memory, past: Sequence[PastTurn], text: str) -> tuple[int, ...]:
    """Return the prompt of an observation, as a session of the package renders it."""
    return renderer.render(Rules(), Observation(text), memory.recall(past)).segments[0].ids


class ConfusedExpert(Demonstrations):
    """Turns of an expert that thinks of the side of the sign, is confused now and then, and often turns at random.

    Its prompts show the past as each of some memories does, so that the policy can read all of them.

    Args:
        start: game and noise.
        turns: to be played.
    """

    def __init__(self, start: MazeStart, turns: int = TURNS) -> None:
        self.start = start
        self.turns = turns

    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Play; each turn counts as an episode, since order does not matter."""
        start, rules, rng = self.start, self.start.rules, np.random.default_rng(0)
        renderer, memories = ChatRenderer(tokenizer, PROMPT), MEMORIES[start.memories]
        found: list[Demonstration] = []
        while len(found) < self.turns:
            signs = rules.signs[rng.integers(len(rules.signs))]
            memory = memories[rng.integers(len(memories))]
            past: list[PastTurn] = []
            for turn in range(rules.turns):
                text, right = rules.words(turn, signs), rules.right(turn, signs)
                thought = text.split()[-1] if turn % (rules.delay + 2) == 0 else past[-1].thought
                if rng.random() < start.confusion:
                    thought = SIDES[rng.integers(2)]
                side = SIDES[rng.integers(2)] if rng.random() < start.noise else thought
                action = side if rules.at_junction(turn) else right
                prompt = ModelInput.of_ids(prompt_of(renderer, memory, past, text))
                found.append(demonstration(len(found), prompt, tokenizer, [thought, action]))
                past.append(PastTurn(text, thought, action))
                if action != right:
                    break
        return found[: self.turns]


class MazeReader:
    """What a policy does in each turn of each episode in which it was right until then.

    All replies are gone through, and the thoughts that a prompt can show are kept apart, so nothing is sampled.

    Args:
        folder: of the model, for its shape and its tokens.
        rules: of the game.
        memory: of the policy; of all thoughts it may show the newest one.
    """

    def __init__(self, folder: Path, rules: Corridors, memory: Memory) -> None:
        self.rules = rules
        self._refuse_older_thoughts(memory)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lm = AutoModelForCausalLM.from_pretrained(folder).eval()  # reads many rows, unlike the one that trains
        renderer = ChatRenderer(tokenizer, PROMPT)
        self.count = len(tokenizer)  # V
        replies = [
            LastWord().parse(renderer.decode([first] if first == tokenizer.eos_token_id else both), ACTIONS, {})
            for first in range(self.count)
            for both in ([first, second] for second in range(self.count))
        ]
        self.thoughts = list(dict.fromkeys(["", *(reply.thought for reply in replies)]))
        outcomes = [
            (self.thoughts.index(reply.thought), ACTIONS.index(reply.action) if reply.action else len(ACTIONS))
            for reply in replies
        ]
        self.outcome_RKA = torch.zeros(len(replies), len(self.thoughts), len(ACTIONS) + 1, dtype=torch.float64)
        self.outcome_RKA[range(len(replies)), *zip(*outcomes, strict=True)] = 1
        rendered = [
            prompt_of(renderer, memory, self._past(turn, signs, thought), rules.words(turn, signs))
            for signs in rules.signs
            for turn in range(rules.turns)
            for thought in self.thoughts
        ]
        distinct = sorted(set(rendered), key=lambda ids: (len(ids), ids))
        lengths = sorted({len(ids) for ids in distinct})
        self.prompts = [torch.tensor([ids for ids in distinct if len(ids) == length]) for length in lengths]
        places = {ids: place for place, ids in enumerate(distinct)}
        self.place_PTK = np.array([places[ids] for ids in rendered]).reshape(-1, rules.turns, len(self.thoughts))

    def _past(self, turn: int, signs: Sequence[str], newest: str, older: str = "") -> list[PastTurn]:
        """Return the turns before one, with the thought of the newest and that of all others, which cannot matter."""
        return [
            PastTurn(self.rules.words(t, signs), newest if t == turn - 1 else older, self.rules.right(t, signs))
            for t in range(turn)
        ]

    def _refuse_older_thoughts(self, memory: Memory) -> None:
        """Refuse a memory whose prompts depend on other thoughts than the newest."""
        for turn in range(self.rules.turns):
            without, with_them = (self._past(turn, self.rules.signs[0], "", older) for older in ("", SIDES[0]))
            if memory.recall(without) != memory.recall(with_them):
                raise ValueError(
                    f"{type(memory).__name__} shows older thoughts than the newest in turn {turn}; at most one "
                    "thought, the newest, can be gone through: set thoughts to 1, or wrap the memory in Silent"
                )

    @torch.no_grad()
    def table(self, weights: Mapping[str, Tensor] | None = None) -> Array:
        """Return the probabilities [P * T, A] of actions; those that cannot be done before a junction count as none.

        Args:
            weights: of the policy; those of the folder when not given.
        """
        if weights is not None:
            self.lm.load_state_dict(weights)
        said_NKA = torch.cat([self._said(ids) for ids in self.prompts]).numpy()
        rows = []
        for place_TK, signs in zip(self.place_PTK, self.rules.signs, strict=True):
            here_K = np.eye(len(self.thoughts))[0]
            for turn, place_K in enumerate(place_TK):
                said_KA = np.einsum("k,kja->ja", here_K, said_NKA[place_K])
                if self.rules.at_junction(turn):
                    goes_on_K = said_KA[:, ACTIONS.index(self.rules.right(turn, signs))]
                else:
                    goes_on_K = said_KA.sum(1)
                    said_KA[:, -1] += said_KA[:, : len(SIDES)].sum(1)
                    said_KA[:, : len(SIDES)] = 0
                rows.append(said_KA.sum(0))
                here_K = goes_on_K / max(goes_on_K.sum(), np.finfo(np.float64).tiny)
        return np.clip(np.stack(rows), 0, 1)

    def _said(self, ids_NL: Tensor) -> Tensor:
        """Return the joint probabilities [N, K, A] of thought and action, of prompts of equal length."""
        out = self.lm(ids_NL, use_cache=True, logits_to_keep=1)
        first_NV, past = out.logits[:, -1].double().softmax(-1), out.past_key_values
        past.batch_repeat_interleave(self.count)
        words = torch.arange(self.count).repeat(len(ids_NL))[:, None]
        second_NVV = self.lm(words, past_key_values=past).logits.double().softmax(-1).view(-1, self.count, self.count)
        replies_NR = (first_NV[:, :, None] * second_NVV).flatten(1)
        return torch.einsum("nr,rka->nka", replies_NR, self.outcome_RKA)

    @torch.no_grad()
    def hidden(self) -> Tensor:
        """Return the last hidden states [N, H] of the prompts, from which values are read."""
        return torch.cat([self.lm.model(ids).last_hidden_state[:, -1] for ids in self.prompts])
