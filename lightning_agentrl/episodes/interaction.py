"""Interactions: the turn loop of one environment as a swappable coroutine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from lightning_agentrl.engines import Engine, Reply, SamplingRequest
from lightning_agentrl.episodes.contract import Contract, contract_error, plain
from lightning_agentrl.episodes.environment import Answer
from lightning_agentrl.episodes.judge import JudgedTurn
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Prompt, Session
from lightning_agentrl.episodes.unread import invents
from lightning_agentrl.prompts.memory import PastTurn
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply, RawParser, TolerantParser
from lightning_agentrl.types import LATE, ModelInput, Segment, SegmentKind, StopReason, Turn

WHOLE_EPISODE_TURNS = 1000  # after which an episode that is played whole is truncated where nothing else is said

NOTHING = Answer("", "", Contract())  # to a reply that is asked for again


class Interaction(ABC):
    """A turn loop, which plays one session until the recorder is full. Many run at a time.

    What has to outlive a call belongs in the session, since one object serves all sessions and is not in checkpoints.
    """

    max_reply_tokens: int
    forks: ClassVar[bool] = True  # an episode can be played on from the state before any of its turns
    max_turns: int | None = None  # of an episode; None: whole episodes end at WHOLE_EPISODE_TURNS
    reply_budget: int | None = None  # tokens of all replies of an episode
    parser: ActionParser

    @abstractmethod
    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        """Record turns until ``recorder.full``; leave the session ready for its next turn, if ``recorder.goes_on``."""


class TurnInteraction(Interaction):
    """Prompt, reply, action, environment step; the default action is taken when the reply names none.

    Args:
        max_reply_tokens: cap on the tokens of one reply.
        parser: reads the action out of a reply; TolerantParser when not given. Where an environment takes free text, as
            one-turn tasks do, the whole reply is the action.
        invalid_penalty: what an invalid reply costs.
        invalid_mode: ``add`` the penalty to the environment's reward, ``replace`` that reward by it, or ``truncate``
            the episode after it (with the penalty added).
        max_turns: truncate episodes here; the environment's own limit applies in any case. None: after 1,000 turns
            where whole episodes are played (groups, validation), else never.
        reply_budget: tokens of all replies of an episode. The last one is cut where they are used up, and the episode
            is truncated. None: no limit.
        ask_again: how often a reply that names no action is asked for again before the default action is taken. Each
            such reply is trained like others, as a turn of the rollout with the penalty as its reward, but the
            environment takes no step, and it does not count for ``max_turns``.
    """

    def __init__(
        self,
        max_reply_tokens: int = 512,
        parser: ActionParser | None = None,
        invalid_penalty: float = 0.1,
        invalid_mode: Literal["add", "replace", "truncate"] = "add",
        max_turns: int | None = None,
        reply_budget: int | None = None,
        ask_again: int = 0,
    ) -> None:
        if max_reply_tokens < 1:
            raise ValueError(f"max_reply_tokens must be at least 1, got {max_reply_tokens}")
        if invalid_mode not in ("add", "replace", "truncate"):
            raise ValueError(f"invalid_mode must be add, replace or truncate, got '{invalid_mode}'")
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be at least 1 or null, got {max_turns}")
        if reply_budget is not None and reply_budget < 1:
            raise ValueError(f"reply_budget must be at least 1 or null, got {reply_budget}")
        if ask_again < 0:
            raise ValueError(f"ask_again must be at least 0, got {ask_again}")
        self.max_reply_tokens = max_reply_tokens
        self.parser = parser or TolerantParser()
        self.invalid_penalty = invalid_penalty
        self.invalid_mode = invalid_mode
        self.max_turns = max_turns
        self.reply_budget = reply_budget
        self.ask_again = ask_again

    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        await session.start()
        while not recorder.full:
            prompt, action, turn = await self.take_turn(session, engine, recorder, temperature, seed)
            recorder.record(prompt, action, turn)
            if turn.done and recorder.goes_on:
                await session.reset()

    async def take_turn(
        self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int
    ) -> tuple[Prompt, Segment, Turn]:
        """Play one turn without recording it.

        Returns:
            Its prompt, its sampled reply, and the turn.
        """
        session.turn_prompt = None
        prompt = session.turn_prompt = session.prompt()
        started = time.perf_counter()
        request_seed = session.reply_seed(seed)
        number = session.place, session.turns_taken
        max_tokens = self.max_reply_tokens
        if self.reply_budget is not None:
            left = self.reply_budget - session.reply_tokens  # none where a resumed run has a smaller budget
            max_tokens = min(max_tokens, max(left, 1))
        reply = await engine.generate(SamplingRequest(prompt.input, max_tokens, temperature, request_seed, number))
        engine_seconds = time.perf_counter() - started
        segment = Segment(SegmentKind.ACTION, ModelInput.of_ids(reply.ids), reply.logps)
        turn = await self._play(session, prompt, reply, segment, engine_seconds, recorder)
        return prompt, segment, turn

    async def _play(
        self,
        session: Session,
        prompt: Prompt,
        reply: Reply,
        segment: Segment,
        engine_seconds: float,
        recorder: Recorder,
    ) -> Turn:
        assert session.worker.answer is not None
        observation, images, role, messages = session.observation, session.images, session.role, session.messages
        all_observed = session.worker.answer.text
        index = len(session.past) + session.all_unread
        contract, renderer = session.contract, session.renderer
        text = renderer.decode(reply.ids)
        parsed = self._parsed(text, contract)
        image = await session.image()
        ask_again = parsed.action is None and session.unread < self.ask_again
        if ask_again:
            result, executed, valid, env_seconds = NOTHING, "", False, 0.0
            session.ask_again(prompt, segment)
        else:
            taken = contract.default_action if parsed.action is None else parsed.action
            started = time.perf_counter()
            result = await session.step(taken)
            env_seconds = time.perf_counter() - started
            executed = result.info.get("executed_action", taken)
            valid = parsed.action is not None and not result.info.get("invalid_action", False)
            past = PastTurn(observation, parsed.thought, executed, text, images, role, messages)
            session.remember(past, prompt, segment)
        session.reply_tokens += len(reply.ids)
        judged = 0.0
        if session.judge is not None and not ask_again:
            seen = JudgedTurn(
                contract.system_prompt, all_observed, images, text, parsed.thought, executed, valid, result.reward
            )
            judged = await session.verdict_on(seen)

        stop = self._stop_reason(session, result, valid or ask_again)
        truncated = stop is not None and stop is not StopReason.ENV_DONE
        cut = truncated or (stop is None and recorder.at_last_turn)
        bootstrap = session.last_state() if cut else None
        # Where an episode ends at a reply that is not executed, the answer before it is how it ended.
        last_answer = session.worker.answer if ask_again and stop is not None else result
        assert last_answer is not None
        own = {} if session.judge is None or ask_again else {"judge": judged}
        return Turn(
            env=session.index,
            episode=session.episode,
            index=index,
            observation=all_observed,
            reply=text,
            thought=parsed.thought,
            action=executed,
            parsed_action=parsed.action,
            thought_tokens=renderer.tokens_before(reply.ids, parsed.action_start),
            valid=valid,
            env_reward=result.reward,
            reward=self._reward(result.reward, valid) + judged,
            episode_return=session.episode_return,
            terminated=result.terminated,
            truncated=truncated,
            stop=stop,
            success=_success(last_answer),
            hit_token_cap=not reply.closed,
            history_cuts=prompt.history_cuts,
            policy_version=reply.policy_version,
            env_seconds=env_seconds,
            engine_seconds=engine_seconds,
            metrics={**last_answer.metrics, **own},
            env_errors=session.worker.take_errors() + ((LATE,) if reply.late else ()),
            lost=session.take_lost(),
            asked_again=ask_again,
            invented=parsed.action is None and invents(text, not reply.closed, contract),
            image=image,
            seen=tuple(chunk.digest for one in images for chunk in one.images),
            bootstrap=bootstrap,
        )

    def _parsed(self, text: str, contract: Contract) -> ParsedReply:
        """Return what the text of a reply says, in Python's own types.

        Raises:
            EnvError: there are no actions that it could name.
        """
        parser = RawParser() if contract.free_text else self.parser
        if not contract.actions and isinstance(parser, TolerantParser):
            raise contract_error("the environment names no actions (attribute `actions`) any more")
        parsed = parser.parse(text, list(contract.actions), contract.aliases)
        if isinstance(parsed.action, np.generic) or isinstance(parsed.thought, np.generic):
            parsed = replace(parsed, thought=plain(parsed.thought), action=plain(parsed.action))
        return parsed

    def _reward(self, env_reward: float, valid: bool) -> float:
        if valid:
            return env_reward
        return -self.invalid_penalty if self.invalid_mode == "replace" else env_reward - self.invalid_penalty

    def _stop_reason(self, session: Session, result: Answer, accepted: bool) -> StopReason | None:
        if result.terminated:
            return StopReason.ENV_DONE
        if result.truncated:
            return StopReason.ENV_TRUNCATED
        if self.invalid_mode == "truncate" and not accepted:
            return StopReason.INVALID_ACTION
        if self.max_turns is not None and len(session.past) >= self.max_turns:
            return StopReason.MAX_TURNS
        if self.reply_budget is not None and session.reply_tokens >= self.reply_budget:
            return StopReason.REPLY_BUDGET
        return None if session.fits else StopReason.CONTEXT_LENGTH


def _success(answer: Answer) -> bool | None:
    success = answer.info.get("success")
    return None if success is None else bool(success)
