"""Sessions: each holds one environment with its running episode, and makes the episode's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.env_worker import EnvWorker, ReplayDiffersError, Start, warn_each
from lightning_agentrl.episodes.environment import Answer, png
from lightning_agentrl.episodes.episode import Episode, Moment, Prompt, Said, make_prompt
from lightning_agentrl.episodes.judge import Judge
from lightning_agentrl.episodes.observation import contract_error
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.prompts.conversation import first_difference
from lightning_agentrl.prompts.memory import Memory, PastTurn
from lightning_agentrl.prompts.messages import Observation
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptTooLongError
from lightning_agentrl.prompts.template import RefusedMessagesError
from lightning_agentrl.types import Segment, input_of
from lightning_agentrl.types.plain import PixelTable

PICTURE_SIDE = 384  # largest side in pixels of a picture in logs; models get the full size
TOO_LONG = "too_long"  # kind of fault: an observation does not fit into a prompt


class Session:
    """One environment and its running episode. A session continues from rollout to rollout.

    Args:
        index: index of the environment over all ranks.
        worker: worker of the environment.
        episode_seed: function that returns the seed of the n-th episode.
        renderer: renderer of prompts.
        memory: memory, which selects what a prompt shows of past turns.
        pictures: whether to store a picture of each turn, if the environment draws pictures.
        first_episode: index of the first episode.
        judge: judge that adds to the rewards of turns; with None, only the environment's reward counts.
        moments: dictionary that collects the state before each step, by (environment, episode, turn), or None.
        place: index among the sessions that play at the same time. Default: ``index``.
        context_length: number of tokens that the model can read; None means no limit.
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
        moments: dict[tuple[int, int, int], Moment] | None = None,
        place: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self.index = index
        self.worker = worker
        self.episode_seed = episode_seed
        self.memory = memory
        self.pictures = pictures
        self.first_episode = first_episode
        self.judge = judge
        self.moments = moments
        self.place = index if place is None else place
        self.context_length = context_length
        self.episode = Episode(first_episode - 1, seed=0, running=False)  # placeholder before the first reset
        self.observation = Observation()  # current observation, with images as the model reads them
        self.lost: list[str] = []  # kinds of faults that ended an episode and that no turn has recorded yet
        self.turn_prompt: Prompt | None = None  # prompt of the last turn that was begun
        self._renderer = renderer
        self._prompt: Prompt | None = None  # cached prompt for the current observation

    @property
    def contract(self) -> Contract:
        """Current contract of the environment."""
        return self.worker.contract

    @property
    def renderer(self) -> ChatRenderer:
        return self._renderer.free_text if self.contract.free_text else self._renderer

    async def start(self) -> None:
        """Begin the next episode, if none is running."""
        if not self.episode.running:
            await self.reset()

    async def reset(self) -> None:
        """Begin the next episode."""
        self._see(await self.worker.reset(self._next_episode(), self.episode.actions))
        self.episode.running = True

    def begin(self) -> None:
        """Begin the first episode from synchronous code."""
        self._see(self.worker.reset_now(self._next_episode(), self.episode.actions))
        self.episode.running = True

    def leave(self) -> None:
        """Drop an episode that cannot continue."""
        self.episode.running = False
        self.episode.turns_taken += 1  # the failed turn counts, so that its reply's seed is not used again

    def take_lost(self) -> tuple[str, ...]:
        """Return the kinds of faults that ended an episode since the last call."""
        lost, self.lost = tuple(self.lost), []
        return lost

    async def step(self, action: str) -> Answer:
        """Take one action in the environment and return its answer."""
        if self.moments is not None:
            moment = self.moment()
            self.moments[moment.key] = moment
        self.turn_prompt = self._prompt or self.turn_prompt
        answer = await self.worker.step(action)
        self._see(answer)
        self.episode.turns_taken += 1
        self.episode.env_return += answer.reward + sum(answer.info.get("earlier_rewards", {}).values())
        self.episode.unread = 0
        return answer

    def remember(self, turn: PastTurn | None, prompt: Prompt, reply: Segment) -> None:
        """Add a turn to the history.

        Args:
            turn: turn to add; None if the reply named no action and was not executed. The next prompt then says so.
            prompt: prompt of the turn.
            reply: sampled reply.
        """
        if turn is None:
            self.episode.unread += 1
            self.episode.asked_again += 1
            self.episode.turns_taken += 1
        else:
            self.episode.past.append(turn)
        self._prompt = None
        self.episode.reply_tokens += len(reply)
        if self.memory.grows:
            self.episode.context = (*prompt.context, *prompt.new, reply)
            self.episode.reply_closed = reply.ids[-1] == self.renderer.template.turn_close_id

    def say(self, prompt: Prompt, reply: Segment, message: Mapping[str, Any], closed: bool) -> None:
        """Add a turn of an environment that keeps its own history.

        Args:
            prompt: prompt of the turn.
            reply: sampled reply.
            message: reply as a message, as the environment stores it.
            closed: whether the reply ended with the turn-close token.
        """
        call, images = prompt.observation.call, tuple(prompt.observation.images)
        assert call is not None
        before = list(self.episode.conversation(call["follows"])) if prompt.follows is None else []
        earlier = [one for turn in before for one in turn.messages]
        seen = tuple(image for turn in before for image in turn.images)
        self.episode.said.append(
            Said(prompt.follows, (*earlier, *call["messages"], message), (*seen, *images), (*prompt.new, reply), closed)
        )
        self.episode.reply_tokens += len(reply)

    def summary_prompt(self, question: str) -> Prompt:
        """Return the prompt that asks for a summary of the episode instead of an action.

        Raises:
            PromptTooLongError: the prompt exceeds its limit even without history.
        """
        asked = Observation(question, messages=(("user", (question,)),), instruction="")
        return make_prompt(self.episode, asked, self.contract, self.renderer, self.memory)

    def summarize(self, summary: str, reply: Segment) -> None:
        """Replace the past of the episode by a summary in later prompts. The environment takes no step."""
        self._prompt = None
        self.episode.summary, self.episode.summarized = summary, len(self.episode.past)
        self.episode.summaries += 1
        self.episode.turns_taken += 1
        self.episode.reply_tokens += len(reply)
        self.episode.context, self.episode.reply_closed = (), True

    async def picture(self) -> bytes | None:
        """Return a PNG of the observation's images or, without any, of the rendered environment.

        Return None if pictures are off, or if there are no images and ``render_mode`` is not ``rgb_array``.
        """
        if not self.pictures:
            return None
        if images := self.observation.images:
            seen = [pixels for one in images for chunk in one.images if (pixels := chunk.pixels) is not None]
            return png(seen, PICTURE_SIDE)
        return await self.worker.draw() if self.contract.render_mode == "rgb_array" else None

    def prompt(self) -> Prompt:
        """Return the prompt for the current observation. The prompt is cached.

        Raises:
            PromptTooLongError: the prompt exceeds its limit even without history.
            EnvError: the chat template cannot render the environment's own messages.
        """
        if self._prompt is None:
            try:
                self._prompt = make_prompt(self.episode, self.observation, self.contract, self.renderer, self.memory)
            except RefusedMessagesError as error:
                raise contract_error(f"the environment's messages cannot be shown: {error}") from error
        return self._prompt

    @property
    def fits(self) -> bool:
        """Whether the prompt for the current observation is within its limit."""
        try:
            return self.renderer.format.allows(self.prompt().input)
        except PromptTooLongError:
            return False

    def last_state(self) -> tuple[Segment, ...]:
        """Return the prompt for the current observation, to bootstrap its value.

        If the observation does not fit into a prompt, or the grown prompt does not fit into the context, return the
        prompt of the last turn.
        """
        prompt = self._readable() or self.turn_prompt
        assert prompt is not None, "an episode with a turn had a prompt"
        return (prompt.as_segment(),)

    def state_before_turn(self) -> tuple[Segment, ...]:
        """Return the prompt of the last turn that was begun, to bootstrap its value after a fault.

        The current observation may already belong to the next turn, since a turn can fail after its environment step.
        """
        return self.last_state() if self.turn_prompt is None else (self.turn_prompt.as_segment(),)

    def _readable(self) -> Prompt | None:
        """Return the current prompt if the prompt fits into the context and its new part into the limit, else None."""
        with suppress(PromptTooLongError, EnvError):
            prompt, most = self.prompt(), self.context_length
            if self.renderer.format.allows(input_of(prompt.new)) and (most is None or len(prompt.input) <= most):
                return prompt
        return None

    def moment(self) -> Moment:
        """Return the state before the next turn."""
        assert self.worker.answer is not None
        fingerprint = self.worker.answer.fingerprint
        return Moment(self.index, self.first_episode, self.episode.copy(), fingerprint, self.prompt().input)

    async def enter(self, moment: Moment, seed: int) -> None:
        """Continue an episode from a moment.

        Args:
            moment: moment in an episode of the same environment.
            seed: seed of the environment's random numbers from then on.

        Raises:
            EnvError: the replayed actions lead to another observation.
        """
        self.episode = moment.episode.copy()
        self._see(await self.worker.fork(self._start, self.episode.actions, moment.fingerprint, seed))

    def state_dict(self) -> dict[str, Any]:
        """Serialize the episode to plain types and pixels; the environment's state is given by its seed and actions."""
        images: PixelTable = {}
        return {
            **self.episode.state_dict(images),
            "fingerprint": "" if self.worker.answer is None else self.worker.answer.fingerprint,
            "env_errors": list(self.worker.errors),
            "lost": list(self.lost),
            "images": images,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replay the actions of the saved episode.

        The episode is lost if the replay fails, if its prompt no longer fits, or if an agent program makes other calls.

        Raises:
            ReplayDiffersError: the replay leads to another observation, although the environment declares that it is
                deterministic.
        """
        episode = dict(state)
        images, fingerprint = episode.pop("images"), episode.pop("fingerprint")
        self.worker.errors, self.lost = list(episode.pop("env_errors")), list(episode.pop("lost"))
        self.episode = Episode.from_state(episode, images)
        if not self.episode.running:
            return
        try:
            self._see(self.worker.replay_now(self._start, self.episode.actions, fingerprint))
        except EnvError as error:
            if isinstance(error, ReplayDiffersError) and not error.declared:
                if error.call is None:
                    raise
                differs = self._difference(error.call, error.turn, fingerprint)
                warn_each(
                    f"the agent of environment {self.index} does not repeat its calls, so its episode is dropped: in "
                    f"call {error.turn}, {differs}"
                )
            self.lost.append(error.kind)
            self.leave()
            return
        if self._readable() is None:  # for example, the resumed run has a smaller prompt limit
            self.lost.append(TOO_LONG)
            self.leave()

    def _difference(self, now: Mapping[str, Any], turn: int, fingerprint: str) -> str:
        """Return a sentence that describes the difference between a call and the recorded call."""

        def conversation(follows: int | None) -> list[Mapping[str, Any]]:
            return [message for one in self.episode.conversation(follows) for message in one.messages]

        if turn < len(self.episode.said):
            before = conversation(turn)[:-1]
        else:
            _, follows, messages = json.loads(fingerprint.splitlines()[0])
            before = [*conversation(follows), *messages]
        return first_difference(before, [*conversation(now["follows"]), *now["messages"]])

    @property
    def _start(self) -> Start:
        return Start(self.index, self.episode.number, self.episode.seed)

    def _next_episode(self) -> Start:
        number = self.episode.number + 1
        self.episode = Episode(number, self.episode_seed(number), self.episode.turns_taken, running=False)
        return self._start

    def _see(self, answer: Answer) -> None:
        try:
            images = self._renderer.see(answer.images) if answer.images else ()
        except ConfigError:
            raise
        except ValueError as error:
            raise contract_error(f"the environment shows an image that the model cannot read: {error}") from None
        self.observation = Observation(
            answer.observation, answer.short_term, images, messages=answer.messages, call=answer.call
        )
        self._prompt = None
