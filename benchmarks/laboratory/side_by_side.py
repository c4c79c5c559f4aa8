"""Whole episodes of a policy in a game of words, side by side: far cheaper than sessions where only returns matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.laboratory.cloning import PROMPT
from benchmarks.laboratory.held_out import Task
from benchmarks.laboratory.policy import LastWord, prompts_of


@dataclass(frozen=True)
class Played:
    """Means over episodes."""

    total_reward: float
    success: float
    turns: float


class SideBySide:
    """Plays an episode from each seed with the same draws every time, so that policies differ by their weights only.

    Args:
        task: the game.
        folder: of the model, for its shape and its tokens.
        seeds: of the episodes.
    """

    def __init__(self, task: Task, folder: Path, seeds: Sequence[int]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lm = AutoModelForCausalLM.from_pretrained(folder).eval()  # reads many rows, unlike the one that trains
        self.reply_tokens = task.reply_tokens
        self.seeds = list(seeds)
        self.envs = [task.make() for _ in seeds]
        self._prompts: dict[str, tuple[int, ...]] = {}

    def play(self, weights: Mapping[str, Tensor] | None = None) -> Played:
        """Play them to their ends at temperature 1; with the weights of the folder when none are given."""
        if weights is not None:
            self.lm.load_state_dict(weights)
        generator = torch.Generator().manual_seed(0)
        texts = [str(env.reset(seed=seed)[0]) for env, seed in zip(self.envs, self.seeds, strict=True)]
        rewards, won = [0.0] * len(texts), [False] * len(texts)
        running, turns = list(range(len(texts))), 0
        while running:
            turns += len(running)
            draws_EW = torch.rand(len(texts), self.reply_tokens, generator=generator, dtype=torch.float64)
            replies = self._replies([texts[k] for k in running], draws_EW[running])
            ended = set()
            for k, reply in zip(running, replies, strict=True):
                env = self.envs[k]
                action = LastWord().parse(reply, list(env.actions), {}).action or env.default_action
                text, reward, terminated, truncated, info = env.step(action)
                texts[k], won[k] = str(text), info["success"]
                rewards[k] += reward
                if terminated or truncated:
                    ended.add(k)
            running = [k for k in running if k not in ended]
        return Played(fmean(rewards), fmean(won), turns / len(texts))

    @torch.no_grad()
    def _replies(self, texts: Sequence[str], draws_NW: Tensor) -> list[str]:
        """Return a reply to each text, sampled with the given uniform draws."""
        new = [text for text in dict.fromkeys(texts) if text not in self._prompts]
        self._prompts |= dict(zip(new, prompts_of(self.tokenizer, new, PROMPT), strict=True))
        ids_NP, past = torch.tensor([self._prompts[text] for text in texts]), None
        said: list[Tensor] = []
        for draws_N in draws_NW.unbind(1):
            out = self.lm(ids_NP, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, chances_NV = out.past_key_values, out.logits[:, -1].double().softmax(-1)
            places_N1 = (chances_NV.cumsum(-1) < draws_N[:, None]).sum(-1, keepdim=True)
            ids_NP = places_N1.clamp(max=chances_NV.shape[-1] - 1)
            said.append(ids_NP[:, 0])
        end = self.tokenizer.eos_token_id
        rows = [row[: row.index(end)] if end in row else row for row in torch.stack(said, 1).tolist()]
        return [str(text) for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]
