"""`agentrl play`: a person in place of the policy, who reads exactly what the model would read."""

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
    """The person has left (end of input)."""


class Person(Engine):
    """A person at the terminal, who is shown each prompt and whose lines are the replies.

    Args:
        tokenizer: of the model that the prompt is for.
    """

    session: Session  # that is played now

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._read = ModelInput()  # the last prompt with its reply
        self._folder: Path | None = None  # of the pictures that were seen

    async def generate(self, request: SamplingRequest) -> Reply:
        """Show a prompt and read a reply, as tokens; cut at the same length as one of the model.

        Raises:
            _InputEnded: at the end of the input.
        """
        prompt, before = request.prompt, self._read
        grown = len(before) if before and prompt.keys[: len(before)] == before.keys else 0
        print(f"\n--- {self._heading(len(prompt), grown)} ---")
        print(shown(self.tokenizer, prompt.behind(grown)))
        if self.session.observation.images:
            print(f"--- what is to be seen now: {self._picture()}")
        text = _line(f"--- your reply, of up to {request.max_tokens} tokens (Ctrl-D ends) > ")
        while text.endswith("\\"):  # a reply of several lines
            text = f"{text[:-1]}\n{_line('... ')}"
        close = self.session.renderer.template.turn_close_id
        reply = (*self.tokenizer.encode(text, add_special_tokens=False), close)
        closed = len(reply) <= request.max_tokens
        if not closed:
            print(f"--- cut after {request.max_tokens} of {len(reply)} tokens, as a reply of the model would be")
        reply = reply[: request.max_tokens]
        self._read = prompt + ModelInput.of_ids(reply)
        return Reply(reply, (0.0,) * len(reply), closed, policy_version=0)

    def _picture(self) -> Path:
        """Write the images of the observation to a file."""
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="agentrl-play-"))
        path = self._folder / f"episode{self.session.index}-turn{len(self.session.episode.past)}.png"
        images = self.session.observation.images
        path.write_bytes(png([c.pixels for one in images for c in one.images if c.pixels is not None]))
        return path

    def _heading(self, tokens: int, grown: int) -> str:
        number = len(self.session.episode.past)
        if grown:
            return f"turn {number}: {tokens - grown} tokens behind the {grown} that were read before"
        parts = prompt_parts(self.session, self.session.renderer).items()
        counts = ", ".join(f"{name} {count}" for name, count in parts if count)
        return f"turn {number}: a prompt of {tokens} tokens ({counts})"

    def start(self, handle: PolicyHandle) -> None:
        """Do nothing: a person has no weights."""

    def sync(self, policy_version: int) -> None:
        """Do nothing: a person has no weights."""

    def stop(self) -> None:
        """Do nothing: a person holds nothing."""


class Play:
    """Episodes that a person plays one after the other, with their results."""

    def __init__(self, saved: SavedPolicy, settings: PolicySettings, source: EnvConfig, seed: int) -> None:
        self.person = Person(saved.tokenizer)
        reader = saved.tokenizer, saved.image_reader, saved.context_length
        self.player = settings.player(EnvPool([source]), *reader, self.person)
        self.seed = seed
        self.solved: list[bool] = []
        self.lost = 0  # of these episodes, to faults
        source.start(torch.device("cpu"))

    def go_on(self) -> None:
        """Play until the input ends."""
        loop = asyncio.new_event_loop()  # one that leaves Ctrl-C as it is
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
    """Read a line; one that comes out of a pipe is shown.

    Raises:
        _InputEnded: at the end of the input, or without any.
    """
    if sys.stdin is None:  # closed by whoever started the command
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
    """Say what came of a reply."""
    if turn.asked_again:
        print("--- your reply named no action; you are asked again")
        return
    why = "" if turn.parsed_action is not None else ", the default action, since your reply named none"
    refused = "" if turn.valid or turn.parsed_action is None else ", which the environment calls invalid"
    print(f"--- action: {turn.action!r}{why}{refused}; reward {turn.reward:g}")
