"""Interaction for games with several sides, all played by the policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lightning_agentrl.engines import Engine
from lightning_agentrl.episodes.interaction import TurnInteraction
from lightning_agentrl.episodes.observation import contract_error, in_short
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.types import Turn
from lightning_agentrl.types.rounding import ROUNDING


class SidesInteraction(TurnInteraction):
    """Play every side of a game with the policy. The turns of each side form a separate episode.

    After every reset and step, ``info["side"]`` of the environment must be the index of the side to move, and
    ``info["side_turns"]`` must list how many turns each side has had. At the end of the game,
    ``info["side_rewards"]`` must list the reward of each side's last turn; for the side that moved, it is the reward
    of the step. Rewards of other steps belong to the side that moved. Only whole games can be played, so groups are
    required. The arguments are those of ``TurnInteraction``, without ``ask_again``. Limits of turns and tokens apply to
    a game, over all sides.
    """

    forks: ClassVar[bool] = False  # the reward of a side depends on turns of the other sides

    async def run(self, session: Session, engine: Engine, recorder: Recorder, temperature: float, seed: int) -> None:
        if recorder.goes_on:
            raise ConfigError("SidesInteraction plays whole games; set data.init_args.groups")
        if self.ask_again:
            raise ConfigError("SidesInteraction does not support ask_again (key data.init_args.interaction.ask_again)")
        await session.start()
        had = Counter(turn.episode for sample in recorder.samples() for turn in sample.turns)
        while not recorder.full:
            side, played = _whose_turn(_info(session))
            episode = len(played) * session.episode.number + side
            if played[side] != had[episode]:  # a mismatch means that the order of turns is unknown
                raise contract_error(
                    f"info['side_turns'] has {in_short(played[side])} turns of side {side}, which has had "
                    f"{had[episode]}; each reply of a side counts as one turn"
                )
            prompt, reply, turn = await self.take_turn(session, engine, recorder, temperature, seed)
            before = recorder.last_of(episode)
            paid = turn.env_reward + (before.episode_return if before else 0.0)  # return of this side
            turn = replace(turn, episode=episode, index=played[side], episode_return=paid)
            recorder.record(prompt, reply, turn)
            had[episode] += 1
            if turn.done:
                self._end_others(recorder, turn, len(played), _info(session).get("side_rewards"))

    def _end_others(self, recorder: Recorder, last: Turn, sides: int, rewards: Any) -> None:
        """End the episodes of the other sides in the same way as the episode of the last turn."""
        if rewards is None and last.terminated:
            raise contract_error("the game is over, but its environment returned no info['side_rewards']")
        earned_by = [0.0] * sides if rewards is None else _earned(rewards, sides)
        mover = last.episode % sides
        if rewards is not None and not math.isclose(last.env_reward, earned_by[mover], rel_tol=ROUNDING):
            raise contract_error(
                f"the last step of a game gave the reward {last.env_reward:g}, and info['side_rewards'] "
                f"{earned_by[mover]:g} for side {mover}, which moved; they must be the same"
            )
        game = last.episode - mover
        for episode in range(game, game + sides):
            turn = recorder.last_of(episode)
            if turn is None or episode == last.episode:  # a side without a turn has no episode
                continue
            earned = earned_by[episode - game]
            recorder.amend(
                episode,
                env_reward=turn.env_reward + earned,
                reward=turn.reward + earned,
                episode_return=turn.episode_return + earned,
                success=earned > 0,
                terminated=last.terminated,
                truncated=last.truncated,
                stop=last.stop,
                bootstrap=last.bootstrap,
            )


def _info(session: Session) -> Mapping[str, Any]:
    assert session.worker.answer is not None, "an episode has begun"
    return session.worker.answer.info


def _earned(rewards: Any, sides: int) -> list[float]:
    """Return the rewards in ``info["side_rewards"]``, one per side.

    Raises:
        EnvError: ``info["side_rewards"]`` is not a list of numbers, one per side.
    """
    try:
        return [float(rewards[side]) for side in range(sides)]
    except (TypeError, ValueError, LookupError, OverflowError):
        raise contract_error(
            f"info['side_rewards'] must have a number for each of {sides} sides, got {in_short(rewards)}"
        ) from None


def _whose_turn(info: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the side to move, and the number of turns that each side has had.

    Raises:
        EnvError: the info of the environment lacks the side or the numbers of turns.
    """
    try:
        side, played = int(info["side"]), [int(turns) for turns in info["side_turns"]]
        assert 0 <= side < len(played)
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError):
        raise contract_error(
            "SidesInteraction needs info['side'], a number from 0, and info['side_turns'], a list of the turns of each "
            "side"
        ) from None
    return side, played
