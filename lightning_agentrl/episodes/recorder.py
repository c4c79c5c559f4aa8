"""Recorders: collect the turns of one session into samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_agentrl.episodes.episode import Prompt
from lightning_agentrl.episodes.observation import LARGEST_REWARD, finite_reward
from lightning_agentrl.types import Sample, Segment, StopReason, Turn


class Recorder:
    """Recorder of a fixed number of turns, or of one whole episode, of a session.

    Args:
        turns: number of turns to record; None records until the episode ends.
        grows: whether the turns of an episode form one growing sample; if False, each turn is a sample.
        on_turn: function that is called after each turn.
    """

    def __init__(self, turns: int | None, grows: bool, on_turn: Callable[[], None] = lambda: None) -> None:
        self.turns_left = turns
        self.goes_on = turns is not None  # whether the session plays another episode after an episode ends
        self.grows = grows
        self.longest: int | None = None  # largest number of turns of a whole episode; None means no limit
        self.recorded = 0  # number of recorded turns
        self._on_turn = on_turn
        self._samples: list[tuple[list[Segment], list[Turn]]] = []

    @property
    def full(self) -> bool:
        if self.turns_left is not None:
            return self.turns_left == 0
        return self.ended or (self.longest is not None and self.recorded >= self.longest)

    @property
    def ended(self) -> bool:
        """Whether the last turn ended its episode."""
        return bool(self._samples) and self._samples[-1][1][-1].done

    @property
    def at_last_turn(self) -> bool:
        """Whether the next turn is the last turn to record, after which advantages are bootstrapped."""
        return self.turns_left == 1

    def record(self, prompt: Prompt, action: Segment, turn: Turn) -> None:
        """Add a turn.

        Raises:
            EnvError: a reward of the turn is not finite.
            ValueError: the recorder is full, or the episode of the turn has ended.
        """
        _check_rewards(turn)
        before = self.last_of(turn.episode)
        enough = self.turns_left == 0 or (self.turns_left is None and self.ended)
        if enough or (before is not None and before.done):
            raise ValueError(
                f"an interaction records turn {turn.index} of episode {turn.episode}, but "
                f"{'the recorder is full' if enough else 'that episode has ended'}; it must check `recorder.full` "
                "before each turn, and reset the session after an episode has ended (key "
                "data.init_args.interaction)"
            )
        goes_on = before is not None and before is self._samples[-1][1][-1] and prompt.follows in (-1, before.index)
        if self.grows and goes_on:
            segments, turns = self._samples[-1]
            segments += [*prompt.new, action]
            turns.append(turn)
        else:
            self._samples.append(([prompt.as_segment(), action], [turn]))
        self.recorded += 1
        if self.turns_left is not None:
            self.turns_left -= 1
        self._on_turn()

    def last_of(self, episode: int) -> Turn | None:
        """Return the last recorded turn of an episode, or None if no turn was recorded."""
        for _, turns in reversed(self._samples):
            if turns[-1].episode == episode:
                return turns[-1]
        return None

    def amend(self, episode: int, **changes: Any) -> None:
        """Change the last turn of an episode whose outcome became known in a turn of another episode.

        Args:
            episode: number of the episode.
            changes: new values of the turn's fields.

        Raises:
            ValueError: no turn of the episode was recorded here; the turn may be in an earlier rollout.
            EnvError: a reward is not finite.
        """
        for _, turns in reversed(self._samples):
            if turns[-1].episode == episode:
                changed = replace(turns[-1], **changes)
                _check_rewards(changed)
                turns[-1] = changed
                return
        raise ValueError(f"this recorder has no turn of episode {episode} to amend")

    def add_reward(self, episode: int, index: int, reward: float) -> bool:
        """Add a reward to an earlier turn; return False if that turn is in an earlier rollout."""
        here = False
        for _, turns in self._samples:
            for place, turn in enumerate(turns):
                if turn.episode != episode or turn.index < index:
                    continue
                changed = replace(turn, episode_return=turn.episode_return + reward)
                if turn.index == index:
                    here = True
                    changed = replace(changed, reward=turn.reward + reward, env_reward=turn.env_reward + reward)
                turns[place] = changed
        return here

    def truncate(self, stop: StopReason, last_state: Callable[[], tuple[Segment, ...]], lost: Sequence[str]) -> bool:
        """Truncate every running episode at its last recorded turn, since the environment cannot continue.

        Args:
            stop: reason of the truncation.
            last_state: function that returns the prompt whose value bootstraps the episode.
            lost: kinds of faults, which are recorded in one of the turns.

        Returns:
            Whether this recorder had a running episode. If not, an earlier rollout cut the episode, or no turn was
            recorded.
        """
        looked_at: set[int] = set()
        found = False
        for _, turns in reversed(self._samples):
            last = turns[-1]
            if last.episode not in looked_at and not last.done:
                noted = last.lost if found else (*last.lost, *lost)
                turns[-1] = replace(last, truncated=True, stop=stop, bootstrap=last_state(), lost=noted)
                found = True
            looked_at.add(last.episode)
        return found

    def samples(self) -> list[Sample]:
        return [Sample(tuple(segments), tuple(turns)) for segments, turns in self._samples]


def _check_rewards(turn: Turn) -> None:
    for reward in (turn.reward, turn.env_reward, turn.episode_return):
        if not abs(reward) <= LARGEST_REWARD:
            finite_reward(f"turn {turn.index} of episode {turn.episode} in environment {turn.env}", reward)


class EpisodeRecorder(Recorder):
    """Recorder of one whole episode of a group. The episode may be played in several parts without cuts.

    Args:
        group: label of the group, stored in every turn.
        grows: see :class:`Recorder`.
        samples: samples of earlier parts.
    """

    def __init__(self, group: int, grows: bool, samples: Sequence[Sample] = ()) -> None:
        super().__init__(None, grows)
        self.group = group
        self._part_left: int | None = None
        self._samples = [(list(sample.segments), list(sample.turns)) for sample in samples]
        self.recorded = sum(len(sample.turns) for sample in samples)

    def go_on(self, turns: int | None) -> None:
        """Begin a part of at most ``turns`` turns; None means up to the end of the episode."""
        self._part_left = turns

    @property
    def full(self) -> bool:
        return super().full or self._part_left == 0

    def record(self, prompt: Prompt, action: Segment, turn: Turn) -> None:
        super().record(prompt, action, replace(turn, group=self.group))
        if self._part_left is not None:
            self._part_left -= 1
