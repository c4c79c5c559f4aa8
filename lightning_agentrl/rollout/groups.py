"""Rollouts of whole groups. A group consists of several complete episodes from one start state.

An episode that is lost to a fault of its environment is played once more, with other seeds of its replies. After a
second loss, the episode's group is not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_agentrl.episodes.recorder import EpisodeRecorder
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.rollout.player import Part, Player, play_parts
from lightning_agentrl.rollout.sizes import GroupRollout
from lightning_agentrl.types import Rollout, Sample, samples_from_plain, samples_to_plain
from lightning_agentrl.types.plain import PixelTable

TRIES = 2  # number of attempts at an episode whose environment fails
SIDES_APART = 2**32  # offset between the labels of two sides of a group; more than the number of groups of a run


class Member:
    """One episode of a group, with a session while the episode is running."""

    def __init__(self, recorder: EpisodeRecorder) -> None:
        self.recorder = recorder
        self.session: Session | None = None
        self.lost: list[str] = []  # kinds of the faults that ended attempts
        self.turns_taken = 0  # number of turns in lost attempts

    def over(self) -> bool:
        return self.recorder.ended or len(self.lost) == TRIES

    @property
    def samples(self) -> list[Sample]:
        return self.recorder.samples()

    def lose(self, kind: str) -> None:
        """End a lost attempt, and drop its turns if another attempt follows."""
        assert self.session is not None
        self.lost.append(kind)
        self.turns_taken, self.session = self.session.episode.turns_taken, None
        if len(self.lost) < TRIES:
            self.recorder = EpisodeRecorder(self.recorder.group, self.recorder.grows)

    def state_dict(self) -> dict[str, Any]:
        images: PixelTable = {}
        return {
            "session": None if self.session is None else self.session.state_dict(),
            "samples": samples_to_plain(self.samples, images),
            "images": images,
            "lost": list(self.lost),
            "turns_taken": self.turns_taken,
        }


class WholeGroups:
    """Rollouts of whole groups of one rank, in order. The weights that play a turn do not depend on timing.

    A rollout plays the episodes of its groups to their end, and then a fixed number of turns of each episode of later
    groups. There are as many concurrent episodes as environments; the next episode begins when an environment is free.

    Args:
        settings: sizes of groups.
        player: player of the sessions; environments of ended episodes are reused.
        rank: rank of this process.
        world: number of ranks.
        at_a_time: number of concurrent episodes on this rank.
        greedy: whether to play one more episode per group with temperature 0. Its return goes to
            ``Rollout.greedy_scores``, in games with several sides separately for each side.
        collected: number of rollouts collected before.
    """

    def __init__(
        self,
        settings: GroupRollout,
        player: Player,
        rank: int,
        world: int,
        at_a_time: int,
        greedy: bool,
        collected: int,
    ) -> None:
        self.settings = settings
        self.player = player
        self.rank, self.world = rank, world
        self.at_a_time = at_a_time
        self.greedy = greedy
        self.collected = collected
        self._members: dict[int, list[Member]] = {}  # groups that have begun and are not in a rollout yet
        self._unnoted: list[str] = []  # kinds of faults that no turn of this rank could record yet
        self._lost_greedily: dict[int, list[str]] = {}  # kinds of faults in greedy episodes of this rollout, by group

    @property
    def total(self) -> int:
        """Number of episodes that end in a rollout on this rank."""
        return len(self.settings.due(0, self.rank, self.world)) * (self.settings.size + self.greedy)

    @property
    def sessions(self) -> list[Session]:
        """The sessions in which an episode is running."""
        return [m.session for members in self._members.values() for m in members if m.session is not None]

    async def collect(self, advance: Callable[[], None]) -> Rollout:
        """Play the next groups to their end; return their samples, ordered by group and episode.

        The rollout is empty if all episodes are lost. Greedy episodes are played with the weights of this rollout. The
        score of a lost greedy episode is NaN, the score of a side without a turn is 0.

        Args:
            advance: function that is called after each episode that ends in this rollout.
        """
        due = self.settings.due(self.collected, self.rank, self.world)
        ahead = self.settings.begun_ahead(self.collected, self.rank, self.world)
        greedy: dict[int, dict[int, float]] = {}
        parts: list[Part] = []
        for group in due:
            parts += [partial(self._end, group, i, advance) for i in range(self.settings.size)]
            parts += [partial(self._play_greedily, group, greedy, advance)] * self.greedy
        parts += [partial(self._play, g, i, self.settings.ahead_turns) for g in ahead for i in self._numbers]
        await play_parts(parts, self.at_a_time, self.player.engine)
        self.collected += 1
        samples = {group: [s for member in self._members[group] for s in member.samples] for group in due}
        rollout = Rollout.from_samples(self._with_faults(samples))
        rows = [(group, sample.turns[-1].episode) for group, of_group in samples.items() for sample in of_group]
        rollout = rollout.union(groups=torch.tensor(sides_apart(rows), dtype=torch.int64))
        for group in due:
            del self._members[group]
        if not self.greedy:
            return rollout
        scores = [greedy[group].get(number, 0.0) if greedy[group] else math.nan for group, number in rows]
        return rollout.union(greedy_scores=torch.tensor(scores, dtype=torch.float32))

    def _with_faults(self, samples: Mapping[int, Sequence[Sample]]) -> list[Sample]:
        """Return all samples, and record the faults of each group in its first turn.

        If a group has no turn, its faults are recorded in a turn of another group, or of the next rollout.
        """
        noted: list[Sample] = []
        unnoted, self._unnoted = self._unnoted, []
        for group, of_group in samples.items():
            unnoted += [kind for member in self._members[group] for kind in member.lost]
            unnoted += self._lost_greedily.pop(group, [])
            for sample in of_group:
                if unnoted:
                    sample, unnoted = _noting(sample, unnoted), []
                noted.append(sample)
        if not noted:
            self._unnoted = unnoted
        elif unnoted:
            noted[0] = _noting(noted[0], unnoted)
        return noted

    @property
    def _numbers(self) -> range:
        return range(self.settings.size)

    async def _end(self, group: int, number: int, advance: Callable[[], None]) -> None:
        await self._play(group, number, None)
        advance()

    async def _play(self, group: int, number: int, turns: int | None) -> None:
        """Play at most ``turns`` turns of an episode (None: all turns), and of its second attempt if it is lost."""
        member = self._member(group, number)
        while not member.over():
            if member.session is None:
                member.session = self._new_session(group, number)
                member.session.episode.turns_taken = member.turns_taken
            session = member.session
            member.recorder.go_on(turns)
            lost = await self.player.play(session, member.recorder)
            if lost:
                member.lose(lost)
            elif member.over():
                member.session = None
            if member.session is None:
                self._release(group, session)
            if not lost:
                return

    async def _play_greedily(
        self, group: int, scores: dict[int, dict[int, float]], advance: Callable[[], None]
    ) -> None:
        scores[group] = {}  # by episode index; each side of a game has an episode
        # Greedy turns are not in the rollout and have the keys of other turns, so no moments are stored.
        greedy = replace(self.player, temperature=0.0, moments=None)
        for _ in range(TRIES):
            session = group_session(greedy, self.settings, group, 0)
            try:
                samples, lost = await greedy.play_episode(session)
                advance()
            finally:
                self._release(group, session)
            if not lost:
                for turn in (turn for sample in samples for turn in sample.turns):
                    scores[group][turn.episode] = scores[group].get(turn.episode, 0.0) + turn.reward
                return
            self._lost_greedily.setdefault(group, []).append(lost)

    def _member(self, group: int, number: int) -> Member:
        if group not in self._members:
            self._members[group] = [Member(EpisodeRecorder(group, self.player.memory.grows)) for _ in self._numbers]
        return self._members[group][number]

    def _new_session(self, group: int, number: int) -> Session:
        return group_session(self.player, self.settings, group, number, pictures=True)

    def _release(self, group: int, session: Session) -> None:
        pool = self.player.pool
        pool.give_back(pool.kind(group), session.worker)

    def state_dict(self) -> dict[int, Any]:
        """Return turns and running sessions of the groups that have begun and are not in a rollout yet, by group index.

        Faults that no turn has recorded yet are stored under the key ``-1 - rank``.
        """
        begun = {group: [member.state_dict() for member in members] for group, members in self._members.items()}
        return begun | ({-1 - self.rank: list(self._unnoted)} if self._unnoted else {})

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Continue the groups of this rank from a checkpoint; groups of other ranks are ignored."""
        for group, members in state.items():
            if group < 0:
                self._unnoted += members if (-1 - group) % self.world == self.rank else ()
            elif group % self.world == self.rank:
                self._members[group] = [self._loaded(group, i, saved) for i, saved in enumerate(members)]

    def _loaded(self, group: int, number: int, saved: Mapping[str, Any]) -> Member:
        samples = samples_from_plain(saved["samples"], saved["images"])
        member = Member(EpisodeRecorder(group, self.player.memory.grows, samples))
        member.lost, member.turns_taken = list(saved["lost"]), saved["turns_taken"]
        if saved["session"] is not None:
            session = member.session = self._new_session(group, number)
            session.load_state_dict(saved["session"])
            for kind in session.take_lost():  # set if the episode could not be replayed
                member.lose(kind)
                # Drop the recorded part of the episode, since its rest cannot be bootstrapped.
                member.recorder = EpisodeRecorder(group, self.player.memory.grows)
                self._release(group, session)
        return member


def sides_apart(rows: Sequence[tuple[int, int]]) -> list[int]:
    """Return a label for each row. Rows of the same side in the same group have equal labels and are compared.

    Episodes of a group have one index unless the interaction plays several sides, which have different indices. Sides
    may have unequal chances, although one policy plays all sides. With one side, the label is the group.

    Args:
        rows: group and episode index of each row.
    """
    numbers: dict[int, set[int]] = {}
    for group, number in rows:
        numbers.setdefault(group, set()).add(number)
    sides = {group: {number: side for side, number in enumerate(sorted(found))} for group, found in numbers.items()}
    return [group + SIDES_APART * sides[group][number] for group, number in rows]


def _noting(sample: Sample, lost: Sequence[str]) -> Sample:
    """Return the sample with kinds of faults recorded in its first turn."""
    first, *others = sample.turns
    return replace(sample, turns=(replace(first, lost=(*first.lost, *lost)), *others))


def group_session(player: Player, settings: GroupRollout, group: int, member: int, pictures: bool = False) -> Session:
    """Return the session of one episode of a group. All episodes of a group have one seed; seeds of replies differ."""
    place, rollout = settings.place(group, member), group // settings.per_rollout
    seed = derive_seed(player.seed, group)
    return player.session(player.pool.kind(group), place, lambda _episode: seed, pictures, first_episode=rollout)
