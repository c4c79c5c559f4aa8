"""Engine and loop of `agentrl play`: a human reads the prompts of the model and types the replies."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.agents.saved_policy import SavedPolicy
from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.environment import png
from lightning_agentrl.episodes.prompt_check import prompt_parts
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.prompts.renderer import shown
from lightning_agentrl.rollout import EnvConfig, Session
from lightning_agentrl.rollout.policy_settings import PolicySettings
from lightning_agentrl.types import ModelInput, Turn


class _InputEnded(Exception):
    """The input has ended."""


class Person(Engine):
    """Engine that shows each prompt at the terminal and reads the reply from the user.

    Args:
        tokenizer: tokenizer of the model whose prompts are shown.
    """

    session: Session  # the running session

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._read = ModelInput()  # last prompt with its reply
        self._folder: Path | None = None  # folder for the pictures

    async def generate(self, request: SamplingRequest) -> Reply:
        """Show a prompt and read a reply, which is cut at the model's token limit.

        Raises:
            _InputEnded: the input has ended.
        """
        prompt, before = request.prompt, self._read
        grown = len(before) if before and prompt.keys[: len(before)] == before.keys else 0
        print(f"\n--- {self._heading(len(prompt), grown)} ---")
        print(shown(self.tokenizer, prompt.behind(grown)))
        if self.session.observation.images:
            print(f"--- image of the observation: {self._picture()}")
        text = _line(f"--- your reply, of up to {request.max_tokens} tokens (Ctrl-D ends) > ")
        while text.endswith("\\"):  # the reply continues on the next line
            text = f"{text[:-1]}\n{_line('... ')}"
        close = self.session.renderer.template.turn_close_id
        reply = (*self.tokenizer.encode(text, add_special_tokens=False), close)
        closed = len(reply) <= request.max_tokens
        if not closed:
            print(f"--- cut after {request.max_tokens} of {len(reply)} tokens, like a reply of the model")
        reply = reply[: request.max_tokens]
        self._read = prompt + ModelInput.of_ids(reply)
        return Reply(reply, (0.0,) * len(reply), closed, policy_version=0)

    def _picture(self) -> Path:
        """Write the images of the observation to a file and return its path."""
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="agentrl-play-"))
        path = self._folder / f"episode{self.session.index}-turn{len(self.session.episode.past)}.png"
        images = self.session.observation.images
        path.write_bytes(png([c.pixels for one in images for c in one.images if c.pixels is not None]))
        return path

    def _heading(self, tokens: int, grown: int) -> str:
        number = len(self.session.episode.past)
        if grown:
            return f"turn {number}: {tokens - grown} new tokens after the {grown} of the last turn"
        parts = prompt_parts(self.session, self.session.renderer).items()
        counts = ", ".join(f"{name} {count}" for name, count in parts if count)
        return f"turn {number}: a prompt of {tokens} tokens ({counts})"

    def start(self, handle: PolicyHandle) -> None:
        """Do nothing: there are no weights."""

    def sync(self, policy_version: int) -> None:
        """Do nothing: there are no weights."""

    def stop(self) -> None:
        """Do nothing: there is nothing to release."""


class Play:
    """Loop over episodes that the user plays, with their results."""

    def __init__(self, saved: SavedPolicy, settings: PolicySettings, source: EnvConfig, seed: int) -> None:
        self.person = Person(saved.tokenizer)
        reader = saved.tokenizer, saved.image_reader, saved.context_length
        self.player = settings.player(EnvPool([source]), *reader, self.person)
        self.seed = seed
        self.solved: list[bool] = []
        self.lost = 0  # number of episodes lost to faults
        source.start(torch.device("cpu"))

    def go_on(self) -> None:
        """Play episodes until the input ends."""
        loop = asyncio.new_event_loop()  # a new loop does not change the handling of Ctrl-C
        try:
            while True:
                loop.run_until_complete(self._episode(self.seed + len(self.solved)))
        except _InputEnded:
            lost = f", lost to faults: {self.lost}" if self.lost else ""
            print(f"episodes played to the end: {len(self.solved) - self.lost}, solved: {sum(self.solved)}{lost}")
        finally:
            loop.close()

    async def _episode(self, seed: int) -> None:
        session = self.player.session(0, len(self.solved), lambda episode: seed)
        recorder = Recorder(None, self.player.memory.grows, on_turn=lambda: _show(recorder.samples()[-1].turns[-1]))
        self.person.session = session
        print(f"\n=== episode {len(self.solved)}, seed {seed} ===")
        lost = await self.player.play(session, recorder)
        last = recorder.samples()[-1].turns[-1] if recorder.recorded else None
        self.solved.append(last is not None and last.succeeded)
        self.lost += bool(lost)
        result = "solved" if self.solved[-1] else f"lost to a fault ({lost})" if lost else "not solved"
        turns, value = recorder.recorded, last.episode_return if last else 0.0
        stop = f", {last.stop.value}" if last and last.stop else ""
        print(f"\n=== {result}: {turns} turn{'s' * (turns != 1)}, return {value:g}{stop}")
        self.player.pool.give_back(0, session.worker)


def _line(question: str) -> str:
    """Read a line, and print it if it comes from a pipe.

    Raises:
        _InputEnded: the input has ended, or standard input is missing.
    """
    if sys.stdin is None:  # the command was started without standard input
        raise _InputEnded
    try:
        text = input(question)
    except EOFError:
        print()
        raise _InputEnded from None
    if not sys.stdin.isatty():
        print(text)
    return text


def _show(turn: Turn) -> None:
    """Print the result of a reply."""
    if turn.asked_again:
        print("--- your reply named no action; reply again")
        return
    why = "" if turn.parsed_action is not None else ", the default action, since your reply named none"
    refused = "" if turn.valid or turn.parsed_action is None else ", which the environment reports as invalid"
    print(f"--- action: {turn.action!r}{why}{refused}; reward {turn.reward:g}")
