"""Group rollouts: whole groups come home, nothing is lost or counted twice, and time and ranks change nothing."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch

from lightning_agentrl.rollout import (
    EnvConfig,
    FaultLimits,
    FullMemory,
    GroupRollout,
    PromptFormat,
    RawParser,
    RolloutDataModule,
    TurnInteraction,
    WindowMemory,
)
from lightning_agentrl.rollout.groups import WholeGroups
from lightning_agentrl.types import ForkPlan, Rollout, StopReason, input_of
from tests.rollout.scripted import LEARNERS, Learner, Scripted, Varied, story

gymnasium.register("Endless-v0", lambda: Scripted(50))
SIZES = GroupRollout(size=3, per_rollout=2, mini_batches=2)
AHEAD = GroupRollout(size=3, per_rollout=2, mini_batches=2, ahead=4, ahead_turns=1)


class Rank:
    fast_dev_run = False

    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world


@contextmanager
def data_module(
    folder: Any, groups: GroupRollout = SIZES, rank: int = 0, world: int = 1, learner: Learner | None = None, **settings
) -> Iterator[RolloutDataModule]:
    defaults = {
        "env": EnvConfig("Varied-v0"),
        "num_envs": 4,
        "prompt": PromptFormat(think=False, max_prompt_tokens=600),
        "interaction": TurnInteraction(4, RawParser()),
        "seed": 3,
    }
    data = RolloutDataModule(**(defaults | settings), groups=groups)
    data.trainer = Rank(rank, world)
    data.setup("fit")
    (learner or Learner(folder)).connect(data)
    try:
        yield data
    finally:
        data.teardown("fit")


def collect(data: RolloutDataModule, count: int) -> list[Rollout]:
    """Rollouts with other weights each time, as in training."""
    learner, rollouts = LEARNERS[data], []
    for _ in range(count):
        rollouts.append(data.stream.collect())
        learner.policy_version += 1
        with torch.no_grad():
            for parameter in learner.policy.parameters():
                parameter.mul_(1.05)
    return rollouts


def episodes(rollout: Rollout) -> list[list]:
    """Turns of each episode in the order of rows."""
    return [list(turns) for _, turns in groupby(rollout.turns, key=lambda turn: (turn.env, turn.episode))]


@pytest.mark.parametrize(
    ("memory", "groups"),
    [
        (WindowMemory(), AHEAD),
        (FullMemory(), SIZES),
        pytest.param(WindowMemory(), SIZES, marks=pytest.mark.slow),
        pytest.param(FullMemory(), AHEAD, marks=pytest.mark.slow),
    ],
)
def test_every_rollout_has_its_groups_as_whole_episodes(tiny_folder, memory, groups):
    with data_module(tiny_folder, groups, memory=memory) as data:
        rollouts = collect(data, 4)
        assert sorted(data.state_dict()["sessions"]) == [*range(8, 8 + groups.ahead)]  # those that are still to come
    for number, rollout in enumerate(rollouts):
        played = episodes(rollout)
        assert [turns[0].group for turns in played] == [2 * number] * 3 + [2 * number + 1] * 3
        assert [turns[0].env for turns in played] == list(range(6))
        for turns in played:
            assert [turn.index for turn in turns] == list(range(len(turns)))
            assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
            assert [turn.bootstrap for turn in turns] == [None] * len(turns)
        assert len(rollout.samples) == (6 if memory.grows else len(rollout.turns))
        assert rollout.groups.tolist() == [sample.turns[0].group for sample in rollout.samples]
        for of_group in (played[:3], played[3:]):
            assert len({turns[0].observation for turns in of_group}) == 1  # one start state
    starts = {turns[0].group: turns[0].observation for rollout in rollouts for turns in episodes(rollout)}
    assert len(set(starts.values())) > 5
    assert len({len(turns) for rollout in rollouts for turns in episodes(rollout)}) > 2
    replies = Counter(turn.reply for rollout in rollouts for turn in rollout.turns if turn.index == 0)
    assert len(replies) > 12  # members draw from seeds of their own, in each rollout anew
    assert len(torch.cat([rollout.episode for rollout in rollouts]).unique()) == 24


def test_a_truncated_episode_has_its_true_last_state(tiny_folder):
    env = EnvConfig("Varied-v0", {"end": "truncated"})
    with data_module(tiny_folder, AHEAD, env=env) as data:
        for rollout in collect(data, 2):
            assert [turn.bootstrap is not None for turn in rollout.turns] == [turn.done for turn in rollout.turns]
            assert not rollout.terminated.any()


@pytest.mark.parametrize("room", [4, 1000])
def test_the_last_state_of_a_full_context_is_one_that_the_model_can_read(room, tiny_folder):
    limit, learner = 200, Learner(tiny_folder)
    learner.context_length = limit + room
    form = PromptFormat(think=False, max_prompt_tokens=limit)
    with data_module(
        tiny_folder, learner=learner, env=EnvConfig("Endless-v0"), memory=FullMemory(), prompt=form
    ) as data:
        samples = collect(data, 1)[0].samples
    assert {sample.turns[-1].stop for sample in samples} == {StopReason.CONTEXT_LENGTH}
    for sample in samples:
        before, last = sample.ids[: sample.action_positions[-1] + 1], input_of(sample.turns[-1].bootstrap)
        if room == 1000:
            assert len(last) > limit
            assert last.ids[: len(before)] == before
        else:
            assert len(last) <= limit
            assert (*last.ids, *sample.actions[-1].ids) == before  # the last prompt


@pytest.mark.slow
def test_episodes_ahead_go_on_with_new_weights(tiny_folder):
    """Turn k of a group that is begun two rollouts ahead is played with the weights of the k-th of them."""
    with data_module(tiny_folder, AHEAD, env=EnvConfig("Varied-v0")) as data:
        rollouts = collect(data, 4)
    for turns in (turns for rollout in rollouts[2:] for turns in episodes(rollout)):
        home = turns[0].episode
        assert [turn.policy_version for turn in turns] == [min(home - 2 + k, home) for k in range(len(turns))]
    assert {turn.policy_version for turn in rollouts[0].turns} == {0}
    with data_module(tiny_folder) as data:
        for number, rollout in enumerate(collect(data, 3)):
            assert {turn.policy_version for turn in rollout.turns} == {number}


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param(WindowMemory(), marks=pytest.mark.slow), FullMemory()])
@pytest.mark.parametrize("groups", [pytest.param(SIZES, marks=pytest.mark.slow), AHEAD])
def test_how_many_play_at_a_time_changes_nothing(tiny_folder, memory, groups):
    rollouts = []
    for num_envs in (1, 5, 32):
        with data_module(tiny_folder, groups, memory=memory, num_envs=num_envs) as data:
            rollouts.append([story(rollout) for rollout in collect(data, 3)])
    assert rollouts[0] == rollouts[1] == rollouts[2]


@pytest.mark.parametrize("groups", [pytest.param(SIZES, marks=pytest.mark.slow), AHEAD])
def test_ranks_share_the_groups(tiny_folder, groups):
    with data_module(tiny_folder, groups) as data:
        one = collect(data, 3)
    ranks = []
    for rank in range(2):
        with data_module(tiny_folder, groups, rank, 2) as data:
            ranks.append(collect(data, 3))
            assert list(data.sizes.own_envs(rank, 2)) == [[0, 1, 2], [3, 4, 5]][rank]
    assert [story(rollout) for rollout in one] == [story(Rollout.concat(both)) for both in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param(WindowMemory(), marks=pytest.mark.slow), FullMemory()])
@pytest.mark.parametrize(
    "env",
    [
        EnvConfig("Varied-v0"),
        pytest.param(EnvConfig("agentrl_envs:GuessNumber-v0", {"highest": 9}), marks=pytest.mark.slow),
    ],
)
def test_saved_groups_go_on_exactly(tiny_folder, tmp_path, memory, env):
    """Episodes that are running, that have ended and that were not begun; on as many ranks as one likes."""
    settings = {"memory": memory, "env": env}
    with data_module(tiny_folder, AHEAD, **settings) as data:
        collect(data, 2)
        state = data.state_dict()
        torch.save(state, tmp_path / "state.pt")
        learner = LEARNERS[data]
        weights = {name: x.clone() for name, x in learner.policy.state_dict().items()}
        expected = [story(rollout) for rollout in collect(data, 3)]
    members = [member for of_group in state["sessions"].values() for member in of_group]
    assert sorted(state["sessions"]) == [4, 5, 6, 7]
    assert any(m["session"] is not None for m in members)
    if memory.grows:
        assert any(m["session"] is None and m["samples"] for m in members)  # ended before its rollout

    def resumed(rank: int, world: int) -> list[Rollout]:
        other = Learner(tiny_folder)
        other.policy.load_state_dict(weights)
        other.policy_version = 2
        with data_module(tiny_folder, AHEAD, rank, world, other, **settings) as data:
            data.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            return collect(data, 3)

    assert [story(rollout) for rollout in resumed(0, 1)] == expected
    both = zip(resumed(0, 2), resumed(1, 2), strict=True)
    assert [story(Rollout.concat(parts)) for parts in both] == expected


def test_other_groups_than_those_of_the_checkpoint_are_refused(tiny_folder):
    with data_module(tiny_folder) as data:
        collect(data, 1)
        state = data.state_dict()
    with data_module(tiny_folder, GroupRollout(size=2, per_rollout=2)) as data:
        data.load_state_dict(state)
        with pytest.raises(ValueError, match=r"are Varied-v0 .*, 2 groups of 3, seed 3; this run has .* groups of 2"):
            data.stream.collect()


@pytest.mark.parametrize("greedy", [False, True])
def test_environments_are_used_again(tiny_folder, greedy):
    made: list[gymnasium.Env] = []

    class Counted(Scripted):
        def __init__(self) -> None:
            super().__init__(2)
            made.append(self)

    gymnasium.register(name := f"Counted{greedy:d}-v0", Counted)
    learner = (Greedy if greedy else Learner)(tiny_folder)
    with data_module(tiny_folder, learner=learner, env=EnvConfig(name), num_envs=2) as data:
        collect(data, 3)
        assert len(made) == 2
        assert sum(len(env.seeds) for env in made) == 3 * 2 * (3 + greedy)  # one reset for each episode


def test_environments_of_running_episodes_are_closed_at_the_end(tiny_folder):
    closed: list[gymnasium.Env] = []

    class Closed(Scripted):
        def close(self) -> None:
            closed.append(self)

    gymnasium.register("Closed-v0", Closed)
    with data_module(tiny_folder, AHEAD, env=EnvConfig("Closed-v0")) as data:
        collect(data, 1)
        assert len(data.sessions) == 12  # of all groups that were begun ahead
    assert len({*closed}) == 12


def test_turns_of_groups_are_drawn_where_there_is_something_to_see(tiny_folder):
    class Drawn(Scripted):
        render_mode = "rgb_array"

        def render(self) -> np.ndarray:
            return np.zeros((4, 4, 3), np.uint8)

    gymnasium.register("Drawn-v0", Drawn)
    with data_module(tiny_folder, AHEAD, env=EnvConfig("Drawn-v0")) as data:
        assert all(turn.image for rollout in collect(data, 2) for turn in rollout.turns)


@pytest.mark.parametrize(
    ("rank", "world", "own"),
    [(0, 2, {-1: ["OSError"]}), (1, 2, {-2: ["died", "died"]}), (0, 1, {-1: ["OSError", "died", "died"]}), (2, 3, {})],
)
def test_faults_that_are_in_no_turn_yet_are_those_of_a_rank_in_a_checkpoint_too(rank, world, own):
    """Those of a rank that there is no more are another's."""
    groups = WholeGroups(SIZES, cast(Any, None), rank, world, 1, False, 0)
    groups.load_state_dict({-1: ["OSError"], -2: ["died", "died"]})
    assert groups.state_dict() == own


class Greedy(Learner):
    greedy_baseline = True


def test_a_greedy_episode_that_is_lost_is_played_once_more(tiny_folder):
    class LostSecond(Scripted):
        episodes = 0

        def step(self, action: str) -> Any:
            LostSecond.episodes += self.count == 0
            if LostSecond.episodes == 2:
                raise OSError("gone")
            return super().step(action)

    gymnasium.register("LostSecond-v0", LostSecond)
    env = EnvConfig("LostSecond-v0", retries=0)
    one, learner = GroupRollout(1, 1, 1), Greedy(tiny_folder)
    with data_module(tiny_folder, one, learner=learner, env=env, num_envs=1, faults=FaultLimits(share=1.0)) as data:
        rollout = data.stream.collect()
    assert rollout.greedy_scores.tolist() == [1.0 + 2.0 + 3.0] * len(rollout)
    assert [kind for turn in rollout.turns for kind in turn.lost] == ["OSError"]


class Spelled(Varied):
    """Another reward for every reply."""

    def step(self, action: str) -> Any:
        text, _, *others = super().step(action)
        return text, float(zlib.crc32(action.encode()) % 1000), *others


gymnasium.register("Spelled-v0", Spelled)


def test_the_greedy_score_is_that_of_the_most_likely_replies(tiny_folder):
    env = EnvConfig("Spelled-v0")
    with data_module(tiny_folder, AHEAD, learner=Greedy(tiny_folder), env=env) as data:
        seen: list[tuple[int, int]] = []
        LEARNERS[data].clock.listeners.append(lambda stage, done, total: seen.append((done, total)))
        rollouts = collect(data, 2)
        assert seen == [(done, 8) for done in range(9)] * 2  # those of two groups, each with its greedy one
    learner = Learner(tiny_folder)
    learner.temperature = 0.0
    with data_module(tiny_folder, GroupRollout(1, 2, 1), learner=learner, env=env) as data:
        for rollout, greedy in zip(rollouts, collect(data, 2), strict=True):
            scores = {turns[0].group: sum(turn.reward for turn in turns) for turns in episodes(greedy)}
            assert rollout.greedy_scores.tolist() == [scores[group] for group in rollout.groups.tolist()]


class Chained(Scripted):
    """Shows and rewards all actions so far."""

    def step(self, action: str) -> Any:
        _, _, *others = super().step(action)
        return self._text(), float(zlib.crc32(self._text().encode()) % 1000), *others

    def _text(self) -> str:
        return f"{super()._text()} after {zlib.crc32(' '.join(self.steps[-self.count :] * (self.count > 0)).encode())}"


gymnasium.register("Chained-v0", Chained)


def test_what_a_greedy_episode_has_seen_is_not_taken_for_what_its_group_has(tiny_folder):
    """Where states are forked; it is played after its group here, and from the same start."""

    def forked(learner: Learner) -> list[tuple[float, ...]]:
        learner.forks = ForkPlan(branches=2, every=1, gamma=1.0)
        with data_module(tiny_folder, SIZES, learner=learner, env=EnvConfig("Chained-v0"), num_envs=1) as data:
            return [turn.branch_returns for turn in data.stream.collect().turns]

    assert forked(Greedy(tiny_folder)) == forked(Learner(tiny_folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, r"data.init_args.groups.size must be at least 1, got 0"),
        ({"ahead": -1}, r"data.init_args.groups.ahead must be at least 0, got -1"),
        ({"size": 2, "per_rollout": 2, "mini_batches": 5}, r"2 \* 2 = 4; lower data.init_args.groups.mini_batches"),
    ],
)
def test_sizes_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        GroupRollout(**settings)


@pytest.mark.parametrize("name", ["turns_per_env", "mini_batch_turns"])
def test_a_number_of_turns_beside_groups_is_refused(name):
    with pytest.raises(ValueError, match=rf"data.init_args.*{name}.*data.init_args.groups"):
        RolloutDataModule(EnvConfig("Varied-v0"), groups=SIZES, **{name: 4})


@pytest.mark.parametrize(("groups", "name"), [(GroupRollout(2, 3), "per_rollout"), (GroupRollout(2, 2, 2, 1), "ahead")])
def test_groups_that_processes_cannot_share_are_refused(groups, name):
    data = RolloutDataModule(EnvConfig("Varied-v0"), groups=groups)
    with pytest.raises(ValueError, match=rf"2.*data.init_args.groups.*{name}.*trainer.devices"):
        data.sizes.check_processes(2)
