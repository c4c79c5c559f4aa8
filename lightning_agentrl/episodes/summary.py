"""Interaction in which the policy summarizes its episode at intervals, so that prompts stay short."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.episode import Prompt
from lightning_agentrl.episodes.interaction import NOTHING, TurnInteraction
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.prompts.renderer import PromptTooLongError
from lightning_agentrl.types import Segment, Turn

QUESTION = "Summarize in a few words what you need to remember. Your summary replaces all of the above."


class SummaryInteraction(TurnInteraction):
    """Ask the policy for a summary after every few turns. The summary replaces all earlier turns in later prompts.

    A summary is a turn of the episode in which the environment takes no step. Its tokens are trained like those of any
    reply, by the rewards after it. Prompts show the last summary above the observation, and the memory selects from the
    turns after that summary. With a growing memory, a new training row begins after each summary.

    Args:
        every: number of turns between two summaries.
        question: text that asks for a summary, instead of an observation. If the prompt with this text exceeds
            `max_prompt_tokens`, no summary is requested.
        options: arguments of `TurnInteraction`; `max_reply_tokens` also limits summaries, and summaries do not count
            for `max_turns`.
    """

    def __init__(self, every: int, question: str = QUESTION, **options: Any) -> None:
        super().__init__(**options)
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every = every
        self.question = question

    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        await session.start()
        while not recorder.full:
            prompt = self._prompt_if_due(session)
            if prompt is None:
                prompt, reply, turn = await self.take_turn(session, engine, recorder, temperature, seed)
            else:
                reply, turn = await self._summarize(session, prompt, engine, recorder, temperature, seed)
            recorder.record(prompt, reply, turn)
            if turn.done and recorder.goes_on:
                await session.reset()

    def shown(self, reply: str) -> str:
        """Return the part of a summary that later prompts show; a subclass may remove thoughts."""
        return reply.strip()

    def _prompt_if_due(self, session: Session) -> Prompt | None:
        """Return the prompt that asks for a summary if one is due and the prompt is within its limit, else None."""
        episode = session.episode
        if len(episode.past) - episode.summarized < self.every or episode.unread:
            return None
        try:
            prompt = session.summary_prompt(self.question)
        except PromptTooLongError:
            return None
        return prompt if session.renderer.format.allows(prompt.input) else None

    async def _summarize(
        self, session: Session, prompt: Prompt, engine: Engine, recorder: Recorder, temperature: float, seed: int
    ) -> tuple[Segment, Turn]:
        """Sample a summary; return the sampled segment and the turn."""
        index, answer = session.episode.turn, session.worker.answer
        assert answer is not None
        segment, reply, seconds = await self._sample(session, prompt, engine, temperature, seed)
        text = session.renderer.decode(reply.ids)
        session.summarize(self.shown(text), segment)
        stop = self._stop_reason(session, NOTHING, accepted=True)
        success = answer.info.get("success") if stop is not None else None
        return segment, Turn(
            env=session.index,
            episode=session.episode.number,
            index=index,
            observation=self.question,
            reply=text,
            thought="",
            action="",
            valid=True,
            env_reward=0.0,
            reward=0.0,
            episode_return=session.episode.env_return,
            terminated=False,
            truncated=stop is not None,
            stop=stop,
            success=None if success is None else bool(success),
            hit_token_cap=not reply.closed,
            history_cuts=prompt.history_cuts,
            policy_version=reply.policy_version,
            env_seconds=0.0,
            engine_seconds=seconds,
            lost=session.take_lost(),
            call=blake2b(repr(prompt.input.keys).encode(), digest_size=16).hexdigest(),
            bootstrap=session.last_state() if stop is not None or recorder.at_last_turn else None,
        )
