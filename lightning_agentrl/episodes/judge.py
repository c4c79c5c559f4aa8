"""Judges, which add a reward to each turn, computed by a rule or another model."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_agentrl.engines import Engine, PolicyHandle, SamplingRequest, TransformersEngine
from lightning_agentrl.episodes.env_worker import EnvWorker, warn_each
from lightning_agentrl.episodes.observation import finite_reward
from lightning_agentrl.errors import ConfigError, EnvError, first_line
from lightning_agentrl.errors.secrets import masked
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer, read_images
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptTooLongError
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.types import ModelInput

# A minus sign after a word or number is not a sign: 7-8 is a range of positive numbers.
_NUMBER = re.compile(r"(?:(?<![\w.])-)?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class JudgedTurn:
    """The parts of a turn that a judge gets."""

    task: str  # system prompt of the environment
    observation: str
    images: tuple[ModelInput, ...]  # images of the observation, as the policy reads them
    reply: str
    thought: str
    action: str  # executed action
    valid: bool  # whether the reply named an action
    reward: float  # reward of the environment


class Judge(ABC):
    """Strategy object that adds a reward to each turn of a source."""

    key = "judge"  # config key, set by the judge's source
    date: RunDate | None = None  # date of the run, set by the judge's source
    timeout: float | None = None  # time limit of a verdict in seconds, set by the judge's source

    @abstractmethod
    async def judge(self, turn: JudgedTurn) -> float:
        """Return the number to add to the reward of a turn.

        ``await`` all slow operations, and run blocking calls with ``asyncio.to_thread``. A
        blocking call makes all environments wait, and the timeout has no effect.
        """

    def start(self, device: torch.device) -> None:  # noqa: B027 - most judges have nothing to load
        """Prepare for judging. The source calls this method before the first turn, with the device of the policy."""

    def release(self) -> None:  # noqa: B027
        """Release what :meth:`start` has loaded, at the end of a run; another run may start the judge again."""


async def verdict_on(turn: JudgedTurn, judge: Judge, worker: EnvWorker) -> float:
    """Return a judge's verdict on a turn, with as many retries as the environment has (``retries``).

    Args:
        turn: last turn of the environment.
        judge: judge to call.
        worker: worker of the environment, which reports the judge as its running call and records recovered errors.

    Raises:
        EnvError: all retries failed.
    """
    errors: list[str] = []
    worker.call, worker.moved_at = "judge", time.monotonic()
    try:
        while True:
            try:
                verdict = await one_verdict(turn, judge)
            except EnvError as error:
                if len(errors) == worker.retries:
                    error.add_note(str(worker.start))
                    raise
                errors.append(error.kind)
                warn_each(f"{error} ({worker.start}); trying again")
            else:
                worker.errors += errors
                return verdict
    finally:
        worker.call, worker.moved_at = "", time.monotonic()


async def one_verdict(turn: JudgedTurn, judge: Judge) -> float:
    """Return a judge's verdict on a turn, without retries.

    Raises:
        EnvError: the verdict is not finite or too late, or the judge raised an error, such as from a busy server.
    """
    limit = asyncio.timeout(judge.timeout)
    try:
        async with limit:
            given = await judge.judge(turn)
    except (EnvError, ConfigError):
        raise
    except Exception as error:  # noqa: BLE001 - a user's code may raise any exception
        if limit.expired():
            raise EnvError(
                "timeout",
                f"the judge took longer than {judge.timeout:g} s, the limit set by {judge.key}_timeout_seconds",
            ) from None
        own = error.__traceback__ and error.__traceback__.tb_next
        trace = "".join(traceback.format_exception(type(error), error, own))
        sentence = f"the judge raised {type(error).__name__}: {first_line(error)} (key {judge.key})"
        raise EnvError(type(error).__name__, masked(sentence), masked(trace)) from None
    return finite_reward("the judge", given)


def check_timeout(seconds: float | None, key: str) -> None:
    """Check that a timeout is above 0 or None; ``key`` is its config key, for the message.

    Raises:
        ValueError: the timeout is 0 or negative.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"{key} must be above 0 or null, got {seconds}")


def compiled(owner: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression that ignores case, or raise a ValueError that begins with ``owner``."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{owner}: the pattern '{pattern}' is not a regular expression ({error})") from error


class PatternJudge(Judge):
    """Judge that rewards replies that match a pattern.

    Args:
        pattern: regular expression to search for in the reply; case matters only within ``(?-i:...)``.
        reward: reward of a match; negative to discourage it.
    """

    def __init__(self, pattern: str, reward: float) -> None:
        self.pattern = compiled("PatternJudge", pattern)
        self.reward = reward

    async def judge(self, turn: JudgedTurn) -> float:
        return self.reward if self.pattern.search(turn.reply) else 0.0


class ModelJudge(Judge):
    """Judge that asks another model about each turn and reads a number from its answer.

    The model is loaded once in each process, on the device of the policy. A model that reads images
    gets the images of a turn. The model decodes greedily, so equal turns get equal rewards.

    The reward is the last number of the answer, clamped to the range 0 to 10, times ``scale``, or 0 without a number.

    Args:
        model: hub id or local folder of the model.
        question: question that follows the turn and explains the scale from 0 to 10.
        scale: factor on the number.
        max_reply_tokens: largest number of tokens of an answer.
    """

    def __init__(
        self,
        model: str,
        question: str,
        scale: float = 0.1,
        max_reply_tokens: int = 64,
    ) -> None:
        if max_reply_tokens < 1:
            raise ValueError(f"ModelJudge: max_reply_tokens must be at least 1, got {max_reply_tokens}")
        self.model, self.question, self.scale, self.max_reply_tokens = model, question, scale, max_reply_tokens
        self._engine: Engine | None = None
        self._chat: ChatRenderer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the loaded model, for copies."""
        return {**vars(self), "_engine": None, "_chat": None}

    def start(self, device: torch.device) -> None:
        """Load the model if it is not loaded yet.

        Raises:
            ValueError: the model cannot be loaded, or its context is too short for a prompt.
        """
        if self._engine is not None:
            return
        try:
            policy = LanguageModel(load_causal_lm(self.model)).requires_grad_(False).to(device)
            tokenizer, reader = load_tokenizer(self.model), read_images(self.model)
        except ValueError as error:  # the message names the key of the policy's model
            sentence = str(error).replace("model.init_args.model", f"{self.key}.init_args.model")
            raise ConfigError(sentence) from error
        room = policy.context_length - self.max_reply_tokens
        words = PromptFormat(think=False, instruction="", max_prompt_tokens=room)
        self._chat = ChatRenderer(tokenizer, words, reader, self.date).free_text
        engine = TransformersEngine(max_batch=1, admission="as_they_come")  # larger batches would change the last bits
        engine.start(PolicyHandle(policy, self._chat.stop_token_ids, nullcontext))
        engine.sync(0)
        self._engine = engine

    def release(self) -> None:
        """Release the model."""
        if self._engine is not None:
            self._engine.stop()
        self._engine = self._chat = None

    async def judge(self, turn: JudgedTurn) -> float:
        """Return the last number of the model's answer, clamped and scaled."""
        assert self._engine is not None
        assert self._chat is not None
        prompt = self._prompt(turn)
        reply = await self._engine.generate(SamplingRequest(prompt, self.max_reply_tokens, temperature=0.0, seed=0))
        numbers = _NUMBER.findall(self._chat.decode(reply.ids).replace("\u2212", "-"))  # the typographic minus sign
        return self.scale * min(max(float(numbers[-1]), 0.0), 10.0) if numbers else 0.0

    def _prompt(self, turn: JudgedTurn) -> ModelInput:
        """Return the turn followed by the question. Texts that are too long for the context are cut in the middle.

        Raises:
            ConfigError: the question alone is too long.
            PromptTooLongError: the images alone are too long.
        """
        assert self._chat is not None
        seen = [c.pixels for one in turn.images for c in one.images if c.pixels is not None]
        images = self._chat.see(seen) if self._chat.image_reader else ()
        most = max(map(len, (turn.task, turn.observation, turn.reply, turn.action)))
        while True:
            shown = "\n\n".join(
                (
                    f"Observation:\n{_middle_cut(turn.observation, most)}",
                    f"Reply:\n{_middle_cut(turn.reply, most)}",
                    f"Action: {_middle_cut(turn.action, most)}",
                    self.question,
                )
            )
            try:
                task = _middle_cut(turn.task, most)
                rendered = self._chat.render(Rules(task), Observation(shown, images=images))
                return rendered.segments[0].input
            except PromptTooLongError as error:
                if most < 2 and images:
                    raise
                if most < 2:
                    raise ConfigError(
                        f"the question of the judge is longer than the context of '{self.model}'; make it shorter (key "
                        f"{self.key}.init_args.question)"
                    ) from error
                most //= 2


def _middle_cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"
