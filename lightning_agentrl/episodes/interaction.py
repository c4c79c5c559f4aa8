"""Interactions: each defines the loop over the turns of an episode, and can be replaced by your own."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from lightning_agentrl.engines import Engine, Reply, SamplingRequest
from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.environment import Answer
from lightning_agentrl.episodes.episode import Prompt
from lightning_agentrl.episodes.judge import JudgedTurn, verdict_on
from lightning_agentrl.episodes.observation import contract_error
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.metrics.invalid_replies import Invalid, judge
from lightning_agentrl.prompts.conversation import conversations_of
from lightning_agentrl.prompts.memory import PastTurn
from lightning_agentrl.prompts.parser import ActionParser, ParsedReply, RawParser, TolerantParser, named, spellings
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import LATE, ModelInput, Segment, SegmentKind, StopReason, Turn

WHOLE_EPISODE_TURNS = 1000  # default limit of turns if whole episodes are played

NOTHING = Answer("", "", Contract())  # stands for the environment's answer to a reply that is not executed


class Interaction(ABC):
    """Turn loop that plays one session until the recorder is full. Many loops run at the same time.

    Store state in the session: one interaction serves all sessions and is not in checkpoints.
    """

    max_reply_tokens: int
    forks: ClassVar[bool] = True  # whether an episode can be continued from the state before any of its turns
    max_turns: int | None = None  # turn limit; None: WHOLE_EPISODE_TURNS for whole episodes
    reply_budget: int | None = None  # limit on the tokens of all replies of an episode
    parser: ActionParser

    @abstractmethod
    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        """Record turns until ``recorder.full``; if ``recorder.goes_on``, leave the session ready for its next turn.

        Args:
            session: environment with its running episode.
            engine: sampler of replies.
            recorder: recorder of the turns.
            temperature: temperature of sampling.
            seed: seed from which the seeds of replies are derived.
        """


class TurnInteraction(Interaction):
    """Turn loop of prompt, reply, action and environment step. A reply without an action takes the default action.

    Args:
        max_reply_tokens: largest number of tokens of one reply.
        parser: parser of the action in a reply. Default: TolerantParser. In environments with free text, such as
            one-turn tasks, the whole reply is the action.
        invalid_penalty: penalty of an invalid reply, subtracted from the reward.
        invalid_mode: ``add`` the penalty to the environment's reward, ``replace`` that reward by the penalty, or
            ``truncate`` the episode after the reply (with the penalty added).
        max_turns: number of turns after which an episode is truncated, besides the environment's own limit. None means
            1,000 turns for whole episodes (groups, validation), and otherwise no limit.
        reply_budget: largest number of tokens of all replies of an episode. When the budget is used up, the last
            reply is cut and the episode truncated. None means no limit.
        ask_again: number of times that a new reply is requested after a reply without an action, before the default
            action is taken. A reply without an action is trained as a turn with the penalty as its reward, but the
            environment takes no step, and the turn does not count for ``max_turns``.
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
        if invalid_mode not in ("add", "replace", "truncate"):
            raise ValueError(f"invalid_mode must be add, replace or truncate, got '{invalid_mode}'")
        least = {"max_reply_tokens": 1, "max_turns": 1, "reply_budget": 1, "ask_again": 0}
        for name, value in zip(least, (max_reply_tokens, max_turns, reply_budget, ask_again), strict=True):
            if value is not None and value < least[name]:
                raise ValueError(f"{name} must be at least {least[name]}, got {value}")
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
            prompt, reply, turn = await self.take_turn(session, engine, recorder, temperature, seed)
            recorder.record(prompt, reply, turn)
            if turn.done and recorder.goes_on:
                await session.reset()

    async def take_turn(
        self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int
    ) -> tuple[Prompt, Segment, Turn]:
        """Play one turn without recording it. The arguments are those of :meth:`run`.

        Returns:
            The prompt, the sampled reply, and the turn.
        """
        prompt = session.prompt()
        segment, reply, engine_seconds = await self._sample(session, prompt, engine, temperature, seed)
        return prompt, segment, await self._play(session, prompt, segment, reply, engine_seconds, recorder)

    async def _sample(
        self, session: Session, prompt: Prompt, engine: Engine, temperature: float, seed: int
    ) -> tuple[Segment, Reply, float]:
        """Sample the reply to a prompt; return it as a segment and as a reply, and the seconds that sampling took."""
        session.turn_prompt = prompt
        turns_taken = session.episode.turns_taken
        max_tokens = self.max_reply_tokens
        if self.reply_budget is not None:
            left = self.reply_budget - session.episode.reply_tokens  # negative if a resumed run has a smaller budget
            max_tokens = min(max_tokens, max(left, 1))
        reply_seed = derive_seed(seed, session.index, turns_taken, session.first_episode)
        call = prompt.observation.call or {}
        if call.get("max_tokens"):
            max_tokens = min(max_tokens, call["max_tokens"])
        # Parallel calls may arrive in another order in a replay, so the seeds of replies are derived from the key.
        if call.get("key"):
            digest, _, occurrence = call["key"].partition("#")
            parts = session.index, session.episode.number, int(digest[:8], 16), int(occurrence)
            reply_seed = derive_seed(seed, *parts)
        number = session.place, turns_taken
        started = time.perf_counter()
        asked = SamplingRequest(prompt.input, max_tokens, temperature, reply_seed, number, tuple(call.get("stop", ())))
        reply = _ended_by(await engine.generate(asked), asked.stop, session.renderer)
        engine_seconds = time.perf_counter() - started
        return Segment(SegmentKind.ACTION, ModelInput.of_ids(reply.ids), reply.logps), reply, engine_seconds

    async def _play(
        self,
        session: Session,
        prompt: Prompt,
        segment: Segment,
        reply: Reply,
        engine_seconds: float,
        recorder: Recorder,
    ) -> Turn:
        """Execute a sampled reply in the environment and return the turn."""
        episode, observed, contract = session.episode, session.worker.answer, session.contract
        assert observed is not None
        index, shown, renderer = episode.turn, prompt.observation, session.renderer
        text, said = renderer.decode(reply.ids), None
        if shown.call is None:
            parsed = self._parse(text, contract)
        else:  # an environment that keeps its own history expects the whole message
            chat = conversations_of(renderer)
            said = chat.reply(reply.ids, len(prompt.input), shown.call, contract.tool_schemas, index)
            parsed = ParsedReply("", json.dumps(said.as_action(shown.call.get("key"))))
        image = await session.picture()
        ask_again = parsed.action is None and episode.unread < self.ask_again
        metrics: dict[str, float] = {}
        judged = 0.0
        if ask_again:
            result, executed, valid, env_seconds = NOTHING, "", False, 0.0
            session.remember(None, prompt, segment)
        else:
            taken = contract.default_action if parsed.action is None else parsed.action
            started = time.perf_counter()
            result = await session.step(taken)
            env_seconds = time.perf_counter() - started
            executed = result.info.get("executed_action", taken)
            valid = parsed.action is not None and not result.info.get("invalid_action", False)
            past = PastTurn(
                shown.text,
                parsed.thought,
                executed,
                text,
                tuple(shown.images),
                shown.role,
                shown.messages,
                follows=len(episode.past) - 1,
            )
            if said is None:
                session.remember(past, prompt, segment)
            else:
                executed, valid = text, not said.unread
                session.say(prompt, segment, said.message, reply.ids[-1] == renderer.template.turn_close_id)
                metrics |= said.metrics
                for turn, reward in result.info.get("earlier_rewards", {}).items():
                    if not recorder.add_reward(episode.number, turn, reward):
                        result = replace(result, reward=result.reward + reward)
            if session.judge is not None:
                task = contract.system_prompt
                seen = JudgedTurn(task, observed.text, past.images, text, past.thought, executed, valid, result.reward)
                judged = metrics["judge"] = await verdict_on(seen, session.judge, session.worker)

        replaced = not valid and self.invalid_mode == "replace"
        reward = (0.0 if replaced else result.reward) - (0.0 if valid else self.invalid_penalty)
        stop = self._stop_reason(session, result, valid or ask_again)
        truncated = stop is not None and stop is not StopReason.ENV_DONE
        cut = truncated or (stop is None and recorder.at_last_turn)
        # If an episode ends at a reply that is not executed, the previous answer contains the outcome.
        last = observed if ask_again and stop is not None else result
        success = last.info.get("success")
        return Turn(
            env=session.index,
            episode=episode.number,
            index=index,
            observation=observed.text,
            reply=text,
            thought=parsed.thought,
            action=executed,
            parsed_action=parsed.action,
            thought_tokens=renderer.tokens_before(reply.ids, parsed.action_start),
            valid=valid,
            env_reward=result.reward,
            reward=reward + judged,
            episode_return=episode.env_return,
            terminated=result.terminated,
            truncated=truncated,
            stop=stop,
            success=None if success is None else bool(success),
            hit_token_cap=not reply.closed,
            history_cuts=prompt.history_cuts,
            policy_version=reply.policy_version,
            env_seconds=env_seconds,
            engine_seconds=engine_seconds,
            metrics={**last.metrics, **metrics},
            env_errors=session.worker.take_errors() + ((LATE,) if reply.late else ()),
            lost=session.take_lost(),
            asked_again=ask_again,
            invented=parsed.action is None and invents(text, not reply.closed, contract),
            image=image,
            call="" if shown.call is None else shown.call.get("key", ""),
            model="" if shown.call is None else shown.call.get("model", ""),
            seen=tuple(chunk.digest for one in shown.images for chunk in one.images),
            bootstrap=session.last_state() if cut else None,
        )

    def _parse(self, text: str, contract: Contract) -> ParsedReply:
        """Parse the thought and the action of a reply.

        Raises:
            EnvError: the environment offers no actions.
        """
        parser = RawParser() if contract.free_text else self.parser
        if not contract.actions and isinstance(parser, TolerantParser):
            raise contract_error("the environment no longer names any actions (attribute `actions`)")
        return parser.parse(text, list(contract.actions), contract.aliases)

    def _stop_reason(self, session: Session, result: Answer, accepted: bool) -> StopReason | None:
        if result.terminated:
            return StopReason.ENV_DONE
        if result.truncated:
            return StopReason.ENV_TRUNCATED
        if self.invalid_mode == "truncate" and not accepted:
            return StopReason.INVALID_ACTION
        if self.max_turns is not None and len(session.episode.past) >= self.max_turns:
            return StopReason.MAX_TURNS
        if self.reply_budget is not None and session.episode.reply_tokens >= self.reply_budget:
            return StopReason.REPLY_BUDGET
        return None if session.fits else StopReason.CONTEXT_LENGTH


def _ended_by(reply: Reply, stop: Sequence[str], renderer: ChatRenderer) -> Reply:
    """Cut a reply after the token that completes a text in ``stop``, since not every engine stops there."""
    if not any(one in renderer.decode(reply.ids) for one in stop):
        return reply
    for end in range(1, len(reply.ids)):
        if any(one in renderer.decode(reply.ids[:end]) for one in stop):
            return replace(reply, ids=reply.ids[:end], logps=reply.logps[:end], closed=False)
    return reply


def invents(reply: str, cut: bool, contract: Contract) -> bool:
    """Return whether a reply without a valid action names an action that does not exist.

    Args:
        reply: text of the reply.
        cut: whether the reply reached its token limit.
        contract: contract of the environment.
    """
    names = spellings(contract.actions, contract.aliases)
    return bool(contract.actions) and judge(named(reply, names), cut, names)[0] is Invalid.INVENTED
