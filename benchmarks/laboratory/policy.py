"""A model as a table of action probabilities, read in every state of the game at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.laboratory.exact import Array
from benchmarks.laboratory.key_door import ACTIONS, MOVES, State
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply
from lightning_agentrl.prompts.renderer import ChatRenderer


class LastWord(ActionParser):
    """A parser that takes the last word of a reply as its action and the words before it as its thought."""

    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        thought, _, word = reply.strip().rpartition(" ")
        return ParsedReply(thought, word if word in actions else None, len(thought) + 1 if thought else 0)


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], wording: PromptFormat
) -> list[tuple[int, ...]]:
    """Return the prompts of observations, as a session of the package renders them without a memory."""
    renderer = ChatRenderer(tokenizer, wording)
    return [renderer.render(Rules(), Observation(text)).segments[0].ids for text in texts]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, states: Sequence[State], wording: PromptFormat) -> Tensor:
    """Return the prompts [S, P] of states."""
    return torch.tensor(prompts_of(tokenizer, [state.words for state in states], wording))


class Reader(Protocol):
    """What reads a policy wherever a game can lead."""

    def table(self, weights: Mapping[str, Tensor] | None = None) -> Array:
        """Return the probabilities of actions, those of none of them last; with the weights of its folder if None."""

    def hidden(self) -> Tensor:
        """Return the last hidden states of all prompts, from which values are read."""


class PolicyReader:
    """What a policy does in each state.

    Args:
        folder: of the model, for its shape and its tokens.
        states: of the game.
        wording: of the prompts.
        reply_tokens: words of a reply.
        thoughts: sampled per state where replies have several words; the chances of the last word are averaged.
    """

    def __init__(
        self, folder: Path, states: Sequence[State], wording: PromptFormat, reply_tokens: int, thoughts: int = 6
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lm = AutoModelForCausalLM.from_pretrained(folder).eval()  # reads padded rows, unlike the one that trains
        self.prompts_SP = prompt_ids(tokenizer, states, wording)
        self.moves = torch.tensor(tokenizer.convert_tokens_to_ids(list(MOVES)))
        self.end = tokenizer.eos_token_id
        self.reply_tokens = reply_tokens
        self.thoughts = thoughts if reply_tokens > 1 else 1

    @torch.no_grad()
    def table(self, weights: Mapping[str, Tensor] | None = None, seed: int = 0) -> Array:
        """Return the probabilities [S, A] of :data:`ACTIONS`; a reply without an action stays.

        Args:
            weights: of the policy; those of the folder when not given.
            seed: of the sampled thoughts, equal ones so that two tables differ by their policies only.
        """
        if weights is not None:
            self.lm.load_state_dict(weights)
        generator = torch.Generator().manual_seed(seed)
        rows = len(self.prompts_SP) * self.thoughts
        ids, past = self.prompts_SP.repeat_interleave(self.thoughts, 0), None
        said = torch.zeros(rows, len(ACTIONS), dtype=torch.float64)  # what the word before names, for early ends
        said[:, -1] = 1
        chances, goes_on = torch.zeros_like(said), torch.ones(rows, 1, dtype=torch.float64)
        for word in range(self.reply_tokens):
            out = self.lm(ids, past_key_values=past, use_cache=True)
            past, next_word = out.past_key_values, out.logits[:, -1].double().softmax(-1)
            ends = next_word[:, [self.end]]
            chances += goes_on * ends * said
            if word == self.reply_tokens - 1:
                named = next_word[:, self.moves]
                chances += goes_on * torch.cat([named, 1 - named.sum(1, keepdim=True) - ends], 1)
                break
            goes_on = goes_on * (1 - ends)
            next_word[:, self.end] = 0
            ids = torch.multinomial(next_word, 1, generator=generator)
            said = torch.cat([ids == self.moves, ~(ids == self.moves).any(1, keepdim=True)], 1).double()
        table = chances.view(-1, self.thoughts, len(ACTIONS)).mean(1).numpy()
        return np.clip(table, 0, 1)

    @torch.no_grad()
    def hidden(self) -> Tensor:
        """Return the last hidden states [S, H] of the prompts, from which the value of a state is read."""
        return self.lm.model(self.prompts_SP).last_hidden_state[:, -1]
