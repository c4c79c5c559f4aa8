"""Forks, which measure values of a rollout's states by playing several episodes (branches) from each state.

Branch k of every state of an episode uses the same random numbers at the same turn. So branches of adjacent states
mostly agree, which reduces the noise of their differences. If a branch repeats the recorded turns up to the next forked
state, it continues as branch k of that state, which is not played twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_agentrl.episodes.env_worker import ReplayDiffersError
from lightning_agentrl.episodes.episode import Moment
from lightning_agentrl.episodes.recorder import EpisodeRecorder
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors import ConfigError, EnvError
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.player import Player, play_parts
from lightning_agentrl.types import ForkPlan, Rollout, StopReason, Turn

REPLIES, NOISE = 0xF0_12, 0xF0_13  # parts of the seeds of replies and of environments in forks
Key = tuple[int, int, int]  # environment, episode, turn


@dataclass
class ForkBranch:
    """An episode that is continued from a moment of a recorded episode."""

    moment: Moment
    kind: int  # index of the source
    number: int  # index among the branches of its moment
    rewards: list[float] = field(default_factory=list)
    lost: bool = False
    joins: Key | None = None  # later moment whose branch with the same index continues this branch


class Forks:
    """Play branches from the states of rollouts, with the weights that sampled the rollouts.

    Forks add ``state_values`` and ``forked_end_values`` to a rollout, and the returns of branches to its turns. A
    branch that is lost to a fault of its environment is left out. Rollouts must be played with the player
    ``recording``, whose sessions store their moments here.

    Args:
        plan: selection of states, and number of branches per state.
        player: player of the branches.
        at_a_time: number of concurrent episodes on this rank.
        clock: stage clock, which times the branches.
    """

    def __init__(self, plan: ForkPlan, player: Player, at_a_time: int, clock: StageClock) -> None:
        self.plan = plan
        self.player = player
        self.moments: dict[Key, Moment] = {}
        self.recording = replace(player, moments=self.moments)
        self.at_a_time = at_a_time
        self.clock = clock

    async def add_values(self, rollout: Rollout, sessions: Sequence[Session]) -> Rollout:
        """Return a rollout with the measured values of its states.

        Args:
            rollout: rollout that was just collected.
            sessions: sessions whose episodes continue after the rollout.

        Raises:
            EnvError: an environment does not repeat its episode, or has too many faults in a row.
        """
        for session in sessions:
            if session.episode.running and session.episode.past:  # the end of the rollout cuts this episode
                moment = session.moment()
                self.moments[moment.key] = moment
        with self.clock.part("forks"):
            branches = self._chosen(rollout)
            each = [branch for of_key in branches.values() for branch in of_key]
            parts = [partial(self._play, branch, place, branches) for place, branch in enumerate(each)]
            if parts:
                await play_parts(parts, self.at_a_time, self.player.engine)
        self.moments.clear()
        return valued(rollout, branches, self.plan.gamma)

    def _chosen(self, rollout: Rollout) -> dict[Key, list[ForkBranch]]:
        """Return the branches to play, for each chosen moment of a rollout."""
        episodes: dict[tuple[int, int], list[Turn]] = {}
        for turn in rollout.turns:
            episodes.setdefault((turn.env, turn.episode), []).append(turn)
        chosen = {}
        for (env, episode), turns in episodes.items():
            turns.sort(key=lambda turn: turn.index)
            numbers = [turn.index for turn in turns]
            wanted = [n for n in numbers if n == numbers[0] or n % self.plan.every == 0]
            wanted += [] if turns[-1].done else [numbers[-1] + 1]
            kind = self.player.pool.kind(env if turns[0].group is None else turns[0].group)
            for number in wanted:  # a turn whose reply was not executed has no moment
                if (moment := self.moments.get((env, episode, number))) is not None:
                    chosen[moment.key] = [ForkBranch(moment, kind, k) for k in range(self.plan.branches)]
        return chosen

    async def _play(self, branch: ForkBranch, place: int, chosen: Mapping[Key, Any]) -> None:
        """Play a branch to its end, or until it joins the branch of a later moment."""
        moment = branch.moment
        session = self.player.session(
            branch.kind, moment.index, lambda _: moment.episode.seed, first_episode=moment.first_episode, place=place
        )
        try:
            with self.player.watchdog.watching(session):
                await self._play_on(session, branch, chosen)
        except ReplayDiffersError as error:
            if not error.declared:
                raise
            raise ConfigError(
                f"environment {moment.index} declares that it is not deterministic, so its states cannot be forked "
                "(attribute `deterministic`); change model.init_args.advantage"
            ) from error
        # The fault is at the start of the branch, or in the comparison with the recorded episode.
        except EnvError as fault:
            branch.lost = True
            self.player.count_lost(session, fault)
        finally:
            session.worker.take_errors()  # errors of branches must not be recorded in turns
            self.player.pool.give_back(branch.kind, session.worker)

    async def _play_on(self, session: Session, branch: ForkBranch, chosen: Mapping[Key, Any]) -> None:
        moment, k, seed = branch.moment, branch.number, self.player.seed
        await session.enter(moment, derive_seed(seed, NOISE, moment.index, moment.episode.number, k))
        player = replace(self.player, seed=derive_seed(seed, REPLIES, k))
        recorder = EpisodeRecorder(0, player.memory.grows)
        following: Moment | None = moment
        while not branch.lost and not recorder.ended and branch.joins is None:
            following = following and self.moments.get((*following.key[:2], following.episode.turn + 1))
            recorder.go_on(None if following is None else 1)
            branch.lost = bool(await player.play(session, recorder))
            if following is not None and not (branch.lost or recorder.ended):
                same = await _reached(session, following, player.interaction.reply_budget is not None)
                branch.joins = following.key if same and following.key in chosen else None
                following = following if same else None
        branch.rewards = [turn.reward for sample in recorder.samples() for turn in sample.turns]


async def _reached(session: Session, moment: Moment, budget: bool) -> bool:
    """Return whether a branch is in the state of a recorded moment, so that a branch from that moment continues it.

    Args:
        session: session of the branch.
        moment: moment of the recorded episode.
        budget: whether the number of reply tokens must be equal as well.
    """
    branch, recorded = session.episode, moment.episode
    same = (
        branch.actions == recorded.actions
        and branch.turns_taken == recorded.turns_taken
        and branch.unread == recorded.unread
        and (not budget or branch.reply_tokens == recorded.reply_tokens)
        and session.prompt().input == moment.prompt
    )
    return same and not await session.worker.drew()


def returns_of(branches: Mapping[Key, Sequence[ForkBranch]], gamma: float) -> dict[Key, list[float]]:
    """Return the discounted return of each branch; NaN for a lost branch.

    Later turns are computed first, since a branch joins only moments of later turns.
    """
    found: dict[Key, list[float]] = {}
    for key in sorted(branches, key=lambda key: key[2], reverse=True):
        found[key] = []
        for branch in branches[key]:
            rest = 0.0 if branch.joins is None else found[branch.joins][branch.number]
            for reward in reversed(branch.rewards):
                rest = reward + gamma * rest
            found[key].append(math.nan if branch.lost else rest)
    return found


def valued(rollout: Rollout, branches: Mapping[Key, Sequence[ForkBranch]], gamma: float) -> Rollout:
    """Return a rollout with each state's mean return over branches, and with the branches' returns in its turns."""
    returns = {key: [one for one in every if not math.isnan(one)] for key, every in returns_of(branches, gamma).items()}
    values = {key: statistics.fmean(every) if every else math.nan for key, every in returns.items()}
    played = {key: sum(len(branch.rewards) for branch in every) for key, every in branches.items()}
    recorded = {(turn.env, turn.episode, turn.index) for turn in rollout.turns}
    samples = []
    state_values, end_values = torch.full(rollout.action_mask.shape, math.nan), torch.zeros(len(rollout))
    for row, sample in enumerate(rollout.samples):
        turns = []
        for turn, *_, here in sample.placed_turns():
            key, after = (turn.env, turn.episode, turn.index), (turn.env, turn.episode, turn.index + 1)
            count = played.get(key, 0)
            state_values[row, here.start] = values.get(key, math.nan)
            if not turn.done and after not in recorded:
                end_values[row] = values.get(after, math.nan)
                count += played.get(after, 0)
            if turn.stop is StopReason.ENV_FAULT:  # the rest of the episode is unknown
                end_values[row] = math.nan
            turns.append(replace(turn, branch_returns=tuple(returns.get(key, ())), forked_turns=count))
        samples.append(replace(sample, turns=tuple(turns)))
    return replace(rollout, samples=tuple(samples)).union(state_values=state_values, forked_end_values=end_values)
