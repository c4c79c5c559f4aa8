"""A session: one environment with its running episode. Sessions live on from rollout to rollout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_agentrl.episodes.contract import Contract, contract_error
from lightning_agentrl.episodes.env_worker import EnvWorker, NotingWhere, ReplayDiffersError, Start, warn_each
from lightning_agentrl.episodes.environment import Answer, png
from lightning_agentrl.episodes.judge import Judge, JudgedTurn, verdict_on
from lightning_agentrl.episodes.moment import Moment
from lightning_agentrl.episodes.seeds import derive_seeds
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.prompts.memory import Memory, OwnMessages, PastTurn
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptTooLongError
from lightning_agentrl.prompts.template import RefusedMessagesError
from lightning_agentrl.types import ModelInput, Segment, SegmentKind, input_of
from lightning_agentrl.types.plain import (
    PixelTable,
    SavedPixels,
    inputs_from_plain,
    inputs_to_plain,
    segments_from_plain,
    segments_to_plain,
)

SEEDS_AT_ONCE = 64  # of replies
PICTURE_SIDE = 384  # pixels at most of a picture that people look at; models see all of it
UNREAD = "Your last reply named no action."  # what the next prompt says of it
TOO_LONG = "too_long"  # kind of the fault that no prompt can hold what an environment says


@dataclass(frozen=True)
class Prompt:
    """The next prompt of an episode: ``context`` was read before (growing samples only), ``new`` is added to it."""

    context: tuple[Segment, ...]
    new: tuple[Segment, ...]
    history_cuts: int

    @cached_property
    def input(self) -> ModelInput:
        return input_of((*self.context, *self.new))

    def as_segment(self) -> Segment:
        """Return everything as one prompt segment."""
        return Segment(SegmentKind.PROMPT, self.input)


class Session:
    """One environment and its episode so far, from which the next prompt is made.

    Args:
        index: number of the environment over all ranks.
        worker: where the environment lives.
        episode_seed: seed of the n-th episode.
        renderer: turns prompts into tokens.
        memory: what of the past a prompt shows.
        pictures: keep a picture of each turn, where there is something to see.
        first_episode: number of the first episode.
        judge: adds to the rewards of turns; None: the environment's reward is all.
        judge_timeout: most seconds for a verdict; None: no limit.
        moments: takes the state before each step, by environment, episode and turn; None: none is kept.
        place: number among the sessions that play at the same time; its index when not given.
        context_length: tokens that the model can read; None: any number.
    """

    def __init__(
        self,
        index: int,
        worker: EnvWorker,
        episode_seed: Callable[[int], int],
        renderer: ChatRenderer,
        memory: Memory,
        pictures: bool = True,
        first_episode: int = 0,
        judge: Judge | None = None,
        judge_timeout: float | None = None,
        moments: dict[tuple[int, int, int], Moment] | None = None,
        place: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self.index = index
        self.place = index if place is None else place
        self.moments = moments
        self.context_length = context_length
        self.worker = worker
        self.episode_seed = episode_seed
        self.memory = memory
        self.pictures = pictures
        self.first_episode = first_episode
        self.judge, self.judge_timeout = judge, judge_timeout
        self.episode = first_episode - 1  # none yet
        self.running = False  # the episode goes on
        self.lost: list[str] = []  # kinds of faults that ended an episode and are in no turn yet
        self.turns_taken = 0  # over all episodes of this session
        self.observation = ""  # long-term text
        self.short_term = ""
        self.images: tuple[ModelInput, ...] = ()  # of the observation
        self.messages: OwnMessages = ()  # of the environment's own, which show the observation
        self.past: list[PastTurn] = []
        self.context: tuple[Segment, ...] = ()
        self.episode_return = 0.0  # environment rewards of this episode so far
        self.reply_closed = True  # the last sampled reply ended with the turn-close token
        self.reply_tokens = 0  # of this episode so far
        self.unread = 0  # replies to this observation that could not be read
        self.all_unread = 0  # of this episode
        self.turn_prompt: Prompt | None = None  # that the running turn was sampled from; None if there is none
        self._judging = False
        self._judged_at = 0.0  # when that changed, on the monotonic clock
        self._seeds: list[int] = []  # of the replies of neighbouring turns
        self._seeds_of: tuple[int, int] | None = None  # the run's seed, and which turns
        self._renderer = renderer
        self._rules = Rules()  # that were made last, and of what
        self._rules_of: Contract | None = None
        self._prompt: Prompt | None = None  # the last one that was made, and of what
        self._made_of: tuple[Answer | None, int, int] = (None, 0, 0)
        self._readable: Prompt | None = None  # the last one that the model can read, its new part within the limit

    @property
    def contract(self) -> Contract:
        """What the environment offers now, such as its actions."""
        return self.worker.contract

    @property
    def renderer(self) -> ChatRenderer:
        return self._renderer.free_text if self.contract.free_text else self._renderer

    @property
    def rules(self) -> Rules:
        """What every prompt says of the environment now."""
        if self._rules_of is not (c := self.contract):
            self._rules = Rules(c.system_prompt, c.examples, c.actions, c.tool_schemas, c.places)
            self._rules_of = c
        return self._rules

    @property
    def role(self) -> str:
        """Role of the message with the current observation."""
        shown = self.past or (self.all_unread and self.memory.grows)  # another memory shows no unread reply
        return self.contract.observation_role if shown else "user"

    @property
    def call(self) -> str:
        """What it waits for: a call of the environment, the judge, or nothing but a reply."""
        return "judge" if self._judging else self.worker.call

    @property
    def moved_at(self) -> float:
        """When that changed, on the monotonic clock."""
        return max(self.worker.moved_at, self._judged_at)

    async def start(self) -> None:
        """Begin the next episode, if none is running."""
        if not self.running:
            await self.reset()

    def begin(self) -> None:
        """Begin the first episode outside of any event loop."""
        self.episode = self.first_episode
        self._see(self.worker.reset_now(self._start))
        self.running = True

    async def reset(self) -> None:
        """Begin the next episode."""
        self.episode += 1
        self.running = False
        self._see(await self.worker.reset(self._start))
        self.past, self.context, self.reply_closed, self.episode_return = [], (), True, 0.0
        self.reply_tokens = self.all_unread = 0
        self.running = True

    def leave(self) -> None:
        """Give up an episode that cannot go on."""
        self.running = False
        self.turns_taken += 1  # the one that failed; the seed of its reply is not used again

    def take_lost(self) -> tuple[str, ...]:
        """Return the kinds of faults that ended an episode since the last call."""
        lost, self.lost = tuple(self.lost), []
        return lost

    async def step(self, action: str) -> Answer:
        """Take one action in the environment and return what it answered."""
        if self.moments is not None:
            moment = self.moment()
            self.moments[moment.key] = moment
        answer = await self.worker.step(action)
        self._see(answer)
        self.turns_taken += 1
        self.episode_return += answer.reward
        return answer

    def reply_seed(self, seed: int) -> int:
        """Return the seed of the next reply in a run of this seed; those of neighbouring turns are made at once."""
        block, place = divmod(self.turns_taken, SEEDS_AT_ONCE)
        if self._seeds_of != (seed, block):
            turns = np.arange(block * SEEDS_AT_ONCE, (block + 1) * SEEDS_AT_ONCE)
            self._seeds = derive_seeds(seed, self.index, turns, self.first_episode)
            self._seeds_of = seed, block
        return self._seeds[place]

    async def verdict_on(self, turn: JudgedTurn) -> float:
        """Return what the judge adds to the reward of a turn; there must be a judge.

        Raises:
            EnvError: it failed once more than the environment may (``retries``).
        """
        assert self.judge is not None
        self._judging, self._judged_at = True, time.monotonic()
        overcome = len(self.worker.errors)
        try:
            with NotingWhere(self._start, self.worker.actions):
                for attempt in itertools.count():
                    try:
                        return await verdict_on(turn, self.judge, self.judge_timeout)
                    except EnvError as error:
                        if attempt >= self.worker.retries:
                            del self.worker.errors[overcome:]
                            raise
                        self.worker.errors.append(error.kind)
                        warn_each(f"{error} (environment {self.index}, episode {self.episode}); trying again")
            raise AssertionError
        finally:
            self._judging, self._judged_at = False, time.monotonic()

    def moment(self) -> Moment:
        """Return the state before the next turn."""
        assert self.worker.answer is not None
        return Moment(
            index=self.index,
            first_episode=self.first_episode,
            episode=self.episode,
            seed=self.episode_seed(self.episode),
            turn=len(self.past) + self.all_unread,
            turns_taken=self.turns_taken,
            turns=len(self.past),
            steps=len(self.worker.actions),
            past=self.past,
            actions=self.worker.actions,
            fingerprint=self.worker.answer.fingerprint,
            context=self.context,
            reply_closed=self.reply_closed,
            episode_return=self.episode_return,
            reply_tokens=self.reply_tokens,
            unread=(self.unread, self.all_unread),
            prompt=self.prompt().input,
        )

    async def enter(self, moment: Moment, seed: int) -> None:
        """Play on from a moment.

        Args:
            moment: of an episode of the same environment.
            seed: of the random numbers that the environment draws from there on.

        Raises:
            EnvError: its actions do not lead there again.
        """
        self.episode, self.turns_taken = moment.episode, moment.turns_taken
        actions = moment.actions[: moment.steps]
        self._see(await self.worker.fork(self._start, actions, moment.fingerprint, seed))
        self.running = True
        self.past, self.context = moment.past[: moment.turns], moment.context
        self.reply_closed, self.episode_return = moment.reply_closed, moment.episode_return
        self.reply_tokens = moment.reply_tokens
        self.unread, self.all_unread = moment.unread

    async def image(self) -> bytes | None:
        """Return a PNG of what the policy sees, or of the environment if it draws itself and shows no images.

        It draws itself if its ``render_mode`` is ``rgb_array``.
        """
        if self.pictures and self.images:
            seen = [pixels for one in self.images for chunk in one.images if (pixels := chunk.pixels) is not None]
            return png(seen, PICTURE_SIDE)
        if not self.pictures or self.contract.render_mode != "rgb_array":
            return None
        return await self.worker.draw()

    def prompt(self) -> Prompt:
        """Return the prompt for the current observation.

        Raises:
            PromptTooLongError: even without history it is over its limit.
            EnvError: the chat template does not show the environment's own messages.
        """
        answer, past, unread = made_of = (self.worker.answer, len(self.past), self.all_unread)  # nothing else counts
        if self._prompt is None or self._made_of[0] is not answer or self._made_of[1:] != (past, unread):
            try:
                self._prompt, self._made_of = self._rendered(), made_of
            except RefusedMessagesError as error:
                raise contract_error(f"the environment's messages cannot be shown: {error}") from error
            most, whole = self.context_length, self._prompt.input
            if self.renderer.format.allows(input_of(self._prompt.new)) and (most is None or len(whole) <= most):
                self._readable = self._prompt
        return self._prompt

    @property
    def fits(self) -> bool:
        """Whether the prompt for the current observation is within its limit."""
        try:
            return self.renderer.format.allows(self.prompt().input)
        except PromptTooLongError:
            return False

    def last_state(self) -> tuple[Segment, ...]:
        """Return the current observation as a prompt from which nothing is sampled.

        Where no prompt can hold an observation, or the model cannot read all that has grown, this is the last prompt
        that could be read.
        """
        with suppress(PromptTooLongError, EnvError):
            self.prompt()
        assert self._readable is not None, "an episode with a turn had a prompt"
        return (self._readable.as_segment(),)

    def state_before_turn(self) -> tuple[Segment, ...]:
        """Return what the running turn was sampled from as a prompt from which nothing is sampled.

        A turn may fail after its step, when the current observation is already that after it. Between two turns this
        is the current observation.
        """
        return self.last_state() if self.turn_prompt is None else (self.turn_prompt.as_segment(),)

    def _rendered(self) -> Prompt:
        short_term = f"{UNREAD}\n{self.short_term}".strip() if self.unread else self.short_term
        shown = Observation(self.observation, short_term, self.images, self.role, self.messages)
        if self.context:
            new = self.renderer.continuation(self.rules, shown, self.reply_closed)
            return Prompt(self.context, new, history_cuts=0)
        recollection = self.memory.recall(list(self.past))  # which a memory may take apart
        rendered = self.renderer.render(self.rules, shown, recollection)
        return Prompt((), rendered.segments, rendered.history_cuts)

    def remember(self, turn: PastTurn, prompt: Prompt, action: Segment) -> None:
        """Add a finished turn to the history."""
        self.past.append(turn)
        self._grow(prompt, action)

    def ask_again(self, prompt: Prompt, reply: Segment) -> None:
        """Leave everything as it is, but say in the next prompt that the reply could not be read."""
        self.unread += 1
        self.all_unread += 1
        self.turns_taken += 1
        self._grow(prompt, reply)

    def _grow(self, prompt: Prompt, action: Segment) -> None:
        if self.memory.grows:
            self.context = (*prompt.context, *prompt.new, action)
            self.reply_closed = action.ids[-1] == self.renderer.template.turn_close_id

    def state_dict(self) -> dict[str, Any]:
        """Return the episode as plain types and pixels; the environment itself as its seed and actions."""
        images: PixelTable = {}
        return {
            "episode": self.episode,
            "running": self.running,
            "turns_taken": self.turns_taken,
            "observation": "" if self.worker.answer is None else self.worker.answer.fingerprint,
            "past": [past_to_plain(turn, images) for turn in self.past],
            "env_actions": list(self.worker.actions) if self.running else [],
            "context": segments_to_plain(self.context, images),
            "closed": self.reply_closed,
            "episode_return": self.episode_return,
            "reply_tokens": self.reply_tokens,
            "unread": [self.unread, self.all_unread],
            "env_errors": list(self.worker.errors),
            "lost": list(self.lost),
            "images": images,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the saved episode again and replay its actions; one that cannot be replayed, or read any more, is lost.

        Raises:
            ReplayDiffersError: the replay does not lead to the saved observation, although the environment declares
                that it does.
        """
        self.episode = state["episode"]
        self.turns_taken = state["turns_taken"]
        self.lost = list(state["lost"])
        self.worker.errors = list(state["env_errors"])
        if not state["running"]:
            return
        try:
            self._see(self.worker.replay_now(self._start, state["env_actions"], state["observation"]))
        except EnvError as error:
            if isinstance(error, ReplayDiffersError) and self.worker.contract.deterministic:
                raise
            self.lost.append(error.kind)
            self.leave()
            return
        self.running = True
        images = state["images"]
        self.past = [past_from_plain(turn, images) for turn in state["past"]]
        self.context = segments_from_plain(state["context"], images)
        self.reply_closed = state["closed"]
        self.episode_return = state["episode_return"]
        self.reply_tokens = state["reply_tokens"]
        self.unread, self.all_unread = state["unread"]
        with suppress(PromptTooLongError, EnvError):
            self.prompt()
        if self._readable is None:  # the run that goes on has shorter prompts
            self.lost.append(TOO_LONG)
            self.leave()

    @property
    def _start(self) -> Start:
        return Start(self.index, self.episode, self.episode_seed(self.episode))

    def _see(self, answer: Answer) -> None:
        try:
            images = self._renderer.see(answer.images)
        except ConfigError:
            raise
        except ValueError as error:
            raise contract_error(f"the environment shows an image that the model cannot read: {error}") from None
        self.unread = 0
        self.observation, self.short_term = answer.observation, answer.short_term
        self.messages, self.images = answer.messages, images


def past_to_plain(turn: PastTurn, images: PixelTable) -> dict[str, Any]:
    """Return a past turn as plain types, with the pixels of its images added to the table."""
    return {**vars(turn), "images": inputs_to_plain(turn.images, images)}


def past_from_plain(plain: Mapping[str, Any], images: SavedPixels) -> PastTurn:
    """Undo :func:`past_to_plain`."""
    return PastTurn(**{**plain, "images": inputs_from_plain(plain["images"], images)})
