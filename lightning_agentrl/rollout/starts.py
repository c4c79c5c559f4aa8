"""Several episodes from each of some starts, apart from training, for those who want to know a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightning_agentrl.episodes.env_worker import EnvWorker, Start
from lightning_agentrl.episodes.recorder import EpisodeRecorder
from lightning_agentrl.errors import EnvError
from lightning_agentrl.rollout.groups import group_session
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.seats import play_parts
from lightning_agentrl.rollout.session_maker import SessionMaker
from lightning_agentrl.rollout.sizes import GroupRollout
from lightning_agentrl.types import Sample


@dataclass(frozen=True)
class StartedEpisode:
    """An episode of a group.

    Args:
        group: its number.
        samples: its turns, with what was read and said; empty if it was lost before its first.
        lost: kind of the fault of its environment that ended it; empty if none did.
        repeats: whether its seed and actions led to the same answers once more; None: they were not played again.
    """

    group: int
    samples: Sequence[Sample]
    lost: str
    repeats: bool | None


async def play_starts(
    settings: GroupRollout,
    episodes: int,
    most_turns: int,
    replays: int,
    make: SessionMaker,
    player: Player,
    at_a_time: int,
) -> list[StartedEpisode]:
    """Play episodes in groups; the last group may be smaller.

    Args:
        settings: sizes of the groups.
        episodes: in all.
        most_turns: of an episode, which is left then.
        replays: the first episodes of so many groups are played again.
        make: makes the sessions.
        player: plays them.
        at_a_time: environments that play beside each other.
    """
    played: dict[int, StartedEpisode] = {}

    async def play(number: int) -> None:
        group, member = divmod(number, settings.size)
        session = group_session(make, settings, group, member)
        recorder = EpisodeRecorder(group, make.memory.grows)
        recorder.go_on(most_turns)
        repeats: bool | None = None
        try:
            lost = await player.play(session, recorder)
            if not lost and member == 0 and group < replays:
                repeats = await replay_is_equal(session.worker)
        finally:
            make.end(session, make.pool.kind(group))
        played[number] = StartedEpisode(group, recorder.samples(), lost, repeats)
        player.advance()

    await play_parts([partial(play, number) for number in range(episodes)], at_a_time, player.engine)
    return [played[number] for number in range(episodes)]


async def replay_is_equal(worker: EnvWorker) -> bool:
    """Return whether the seed and the actions of a running episode lead twice to the same answers, and to its last one.

    An environment that declares that it cannot repeat an episode is not asked.
    """
    start, actions, last = worker.start, list(worker.actions), worker.answer
    if start is None or last is None or not worker.contract.deterministic:
        return False
    try:
        first, second = [await _answers(worker, start, actions) for _ in range(2)]
    except EnvError:
        return False
    return first == second and first[-1][0] == last.fingerprint


async def _answers(worker: EnvWorker, start: Start, actions: Sequence[str]) -> list[tuple[str, float, bool, bool]]:
    """Return fingerprint, reward and end of each answer."""
    answer = await worker.reset(start)
    found = [(answer.fingerprint, answer.reward, answer.terminated, answer.truncated)]
    for action in actions:
        if answer.terminated or answer.truncated:
            break
        answer = await worker.step(action)
        found.append((answer.fingerprint, answer.reward, answer.terminated, answer.truncated))
    return found
