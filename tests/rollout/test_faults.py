"""Faults of environments beyond their retries: an episode is lost and counted, and everything else goes on."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import gymnasium
import pytest
import torch
import torch.distributed as dist

from lightning_agentrl.agents.selection import lost_rows, without_rows
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.errors import EnvError
from lightning_agentrl.metrics.episodes import summarise
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.rollout import (
    ActionParser,
    EnvConfig,
    FaultLimits,
    FullMemory,
    GroupRollout,
    PromptFormat,
    RawParser,
    RolloutDataModule,
    TolerantParser,
    TurnInteraction,
    ValidationConfig,
    WindowMemory,
)
from lightning_agentrl.rollout.groups import WholeGroups
from lightning_agentrl.types import ModelInput, Rollout, Sample, StopReason, input_of
from tests.episodes.small_envs import GARBAGE, Walk
from tests.episodes.test_env_worker import config, replace_sessions
from tests.rollout.scripted import FREE_TEXT, Learner, Scripted, Workplace, play_held_out, story, workplace
from tests.rollout.test_groups import Rank, data_module
from tests.started import outcomes
from tests.types import samples

FAULT = StopReason.ENV_FAULT
RAISED = {
    "raises": "IndexError",
    "leaves": "SystemExit",
    "stops": "StopIteration",
    "cancels": "CancelledError",
    "asks for too much memory": "MemoryError",
}
ENDED = {"exits": "died", "aborts": "died", "hangs": "timeout"}


@contextmanager
def played(folder: Any, *configs: EnvConfig, **settings: Any) -> Iterator[Workplace]:
    """A workplace with environments of these configs."""
    with workplace(folder, [Walk() for _ in configs], **settings) as place:
        replace_sessions(place, *configs)
        try:
            yield place
        finally:
            for session in place.sessions:
                session.worker.close()


def lost(rollout: Rollout) -> dict[str, float]:
    numbers = over_ranks(rollout_numbers(rollout))
    return {name.removeprefix("env/lost/"): x for name, x in numbers.items() if name.startswith("env/lost/")}


def places(rollout: Rollout) -> list[tuple[int, int, StopReason | None]]:
    return [(turn.episode, turn.index, turn.stop) for turn in rollout.turns]


# What becomes of an episode


@pytest.mark.parametrize(
    ("worker", "fault", "kind"),
    [
        *(("thread", fault, kind) for fault, kind in RAISED.items()),
        ("process", "exits", "died"),
        *(
            pytest.param("process", fault, {**RAISED, **ENDED}[fault], marks=pytest.mark.slow)
            for fault in ("leaves", "aborts", "hangs")
        ),
    ],
)
def test_a_fault_ends_its_episode_at_the_last_sound_turn(worker, fault, kind, tiny_folder, tmp_path):
    """The failing turn is not recorded, the value of what it was shown stands for the rest, and the next one begins."""
    settings = {"timeout_seconds": 4.0} if kind == "timeout" else {}
    once = str(tmp_path / "happened")
    with played(tiny_folder, config("Walk", worker, 0, fault=fault, at=3, length=9, once=once, **settings)) as place:
        rollout = place.collect(5)
        failing = place.engine.log[2][0].prompt
    assert places(rollout) == [(0, 0, None), (0, 1, FAULT), (1, 0, None), (1, 1, None), (1, 2, None)]
    last = rollout.turns[1]
    assert (last.truncated, last.terminated, last.reward) == (True, False, 2.0)
    assert input_of(last.bootstrap) == failing
    assert last.lost == (kind,)
    assert lost(rollout) == {kind: 1.0}
    assert len(place.engine.log) == 6


NOT_FINITE = ("reward that is no number", "endless reward")
OF_STEPS = ("reward", *NOT_FINITE, "terminated", "truncated")  # what a reset does not give


def kind_of(garbage: str) -> str:
    return "reward" if garbage in NOT_FINITE else "contract"


@pytest.mark.parametrize(
    ("worker", "at", "names", "retries"),
    [
        ("thread", 2, list(GARBAGE), 0),
        ("thread", 2, list(GARBAGE), 1),
        pytest.param("thread", 0, [name for name in GARBAGE if name not in OF_STEPS], 0, marks=pytest.mark.slow),
        pytest.param("process", 2, ["reward", "system prompt"], 1, marks=pytest.mark.slow),
    ],
)
def test_garbage_of_any_kind_is_retried_and_then_costs_the_episode(worker, at, names, retries, tiny_folder, tmp_path):
    """In each field of the contract, and in each part of what reset and step return."""
    environments = [
        config("Garbled", worker, retries, garbage=name, at=at, once=str(tmp_path / name)) for name in names
    ]
    with played(tiny_folder, *environments, interaction=TurnInteraction(4, TolerantParser())) as place:
        rollout = place.collect(3)
    assert len(rollout.turns) == 3 * len(names)
    for number, name in enumerate(names):
        turns = [turn for turn in rollout.turns if turn.env == number]
        costs = retries == 0 or name == "no actions"  # that is known only once a reply is read
        assert [kind for turn in turns for kind in (turn.lost if costs else turn.env_errors)] == [kind_of(name)], name


@pytest.mark.parametrize("memory", [WindowMemory(), FullMemory()])
def test_every_call_may_fail_and_no_turn_is_lost_or_doubled(memory, tiny_folder):
    """Also where the last sound turn is in an earlier rollout, which was bootstrapped there."""
    failing = {(0, 2), (1, 0), (3, 1), (5, 3)}  # episode and step; step 0 is the reset

    class Failing(Scripted):
        episode = -1

        def reset(self, **settings):
            Failing.episode += 1
            self.fail(0)
            return super().reset(**settings)

        def fail(self, step: int) -> None:
            if (Failing.episode, step) in failing:
                raise OSError("gone")

    env = Failing(4, on_step=lambda count: env.fail(count))
    with workplace(tiny_folder, [env], memory=memory) as place:
        rollouts = [place.collect(count) for count in (1, 3, 3, 5, 4)]
    assert [places(rollout) for rollout in rollouts] == [
        [(0, 0, None)],
        [(2, 0, None), (2, 1, None), (2, 2, None)],
        [(2, 3, "env_done"), (4, 0, None), (4, 1, None)],
        [(4, 2, None), (4, 3, "env_done"), (5, 0, None), (5, 1, FAULT), (6, 0, None)],
        [(6, 1, None), (6, 2, None), (6, 3, "env_done"), (7, 0, None)],
    ]
    assert rollouts[0].turns[0].bootstrap is not None
    assert [[turn.lost for turn in rollout.turns] for rollout in rollouts[1:4]] == [
        [("OSError", "OSError"), (), ()],
        [(), ("OSError",), ()],
        [(), (), (), ("OSError",), ()],
    ]
    assert len({request.seed for request, _ in place.engine.log}) == len(place.engine.log)


def test_making_an_environment_may_fail_too(tiny_folder):
    """When a run has begun; before it, that is refused."""
    made = []

    def make() -> gymnasium.Env:
        made.append("one")
        if len(made) <= 3:
            raise OSError("no licence is left")
        return Scripted(4)

    with workplace(tiny_folder, [Scripted(4)]) as place:
        (old,) = place.sessions
        worker = place.worker(make, retries=1)
        with pytest.raises(EnvError, match="no licence is left"):
            worker.wait()
        place.sessions = [type(old)(0, worker, old.episode_seed, place.renderer, old.memory)]
        rollout = place.collect(2)
    assert [turn.env_errors for turn in rollout.turns] == [("OSError",), ()]


class Licensed(Scripted):
    """Can be made as often as there are licences."""

    licences = 0

    def __init__(self) -> None:
        Licensed.licences -= 1
        if Licensed.licences < 0:
            raise OSError("no licence is left")
        super().__init__(2)


gymnasium.register("Licensed-v0", Licensed)


def test_an_episode_of_validation_whose_environment_cannot_be_made_is_lost(tiny_folder):
    """The run goes on, and the episode counts as one without success."""
    Licensed.licences = 5  # those of training, and one that validation plays in
    environment, sizes = EnvConfig("Licensed-v0", retries=0), GroupRollout(size=2, per_rollout=2)
    with group_data(tiny_folder, sizes, env=environment, validation=ValidationConfig(2, 2)) as data:
        data.stream.collect()
        results = play_held_out(data, data.val_dataloader().seeds)
        assert len(data.stream.collect().turns) == 8
    assert [(result.lost, result.turns) for result in results] == [(False, 2), (True, 0)]


def test_a_process_that_cannot_be_started_is_an_error_of_its_environment():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no further files
    try:
        with pytest.raises(EnvError, match="process cannot be started: OSError") as error:
            config("Walk").make_worker().wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.value.kind == "start"


def test_an_environment_that_cannot_be_replayed_is_not(tiny_folder, tmp_path):
    once = str(tmp_path / "happened")
    fail = {"fault": "raises", "at": 3, "length": 9, "once": once}
    with played(tiny_folder, config("Unrepeatable", "thread", 2, **fail)) as place:
        rollout = place.collect(4)
        state = place.sessions[0].state_dict()
    assert places(rollout) == [(0, 0, None), (0, 1, FAULT), (1, 0, None), (1, 1, None)]
    assert [turn.env_errors for turn in rollout.turns] == [()] * 4
    assert lost(rollout) == {"IndexError": 1.0}
    with played(tiny_folder, config("Unrepeatable", "thread", 2, length=9)) as place:  # a resumed run
        place.sessions[0].load_state_dict(state)
        rollout = place.collect(2)
    assert places(rollout) == [(2, 0, None), (2, 1, None)]
    assert lost(rollout) == {"replay": 1.0}


# When a run stops


def test_one_loss_after_the_other_stops_the_run_with_a_sentence(tiny_folder):
    class Closed(Scripted):
        def reset(self, **settings):
            raise ConnectionError("no server")

    with workplace(tiny_folder, [Closed(4), Scripted(4)]) as place:
        with pytest.raises(EnvError) as error:
            place.collect(3)
        place.sessions = [place.session(7, Scripted(50))]
        assert len(place.collect(2).turns) == 2  # the engine is still there
    assert "environment 0 lost 6 episodes in a row" in str(error.value)
    assert "data.init_args.faults.in_a_row" in str(error.value)
    assert "no server" in str(error.value)
    assert error.value.kind == "ConnectionError"
    assert "no server" in error.value.trace


def broken_on_one(rank: int, store: Path, folder: Path, ahead: int) -> None:
    """Collect on one of two ranks, of which the second has an environment that never begins."""

    class Broken(Scripted):
        def reset(self, **settings: Any) -> Any:
            if rank:
                raise OSError("the disk of this machine is gone")
            return super().reset(**settings)

    warnings.simplefilter("ignore")
    gymnasium.register("Broken-v0", Broken)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = RolloutDataModule(
        EnvConfig("Broken-v0"),
        num_envs=2,
        turns_per_env=2,
        mini_batch_turns=4,
        max_staleness=ahead,
        prompt=FREE_TEXT,
        interaction=TurnInteraction(4, RawParser()),
        faults=FaultLimits(in_a_row=2),
    )
    data.trainer = cast(Any, Rank(rank, 2))
    Learner(folder).connect(data)
    try:
        if ahead:
            data.collector.begin_next()
        data.stream.collect()
    finally:
        data.teardown("fit")
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.long), 1])
def test_all_ranks_stop_where_one_environment_is_broken(ahead, tiny_folder, tmp_path):
    ends = outcomes(2, broken_on_one, tmp_path / "store", tiny_folder, ahead, folder=tmp_path, seconds=240)
    codes, outputs = zip(*ends, strict=True)
    assert codes == (2, 1), outputs
    assert "environment 1 lost 3 episodes in a row" in outputs[1]
    assert "the disk of this machine is gone" in outputs[1]
    assert "lost" not in outputs[0]


def test_an_episode_whose_replay_fails_is_lost(tiny_folder):
    with workplace(tiny_folder, [Scripted(9)]) as place:
        place.collect(2)
        state = place.sessions[0].state_dict()

        def fall(count: int) -> None:
            if len(env.seeds) == 1:
                raise OSError("gone")

        env = Scripted(9, on_step=fall)
        place.sessions = [place.session(0, env)]
        place.sessions[0].load_state_dict(state)
        rollout = place.collect(2)
    assert places(rollout) == [(1, 0, None), (1, 1, None)]
    assert lost(rollout) == {"OSError": 1.0}


def test_a_share_of_lost_episodes_stops_the_run(tiny_folder):
    def half(count: int) -> None:
        if count == 2 and env.seeds[-1] % 2:
            raise OSError("gone")

    env = Scripted(2, on_step=half)
    with workplace(tiny_folder, [env]) as place:
        rollout = place.collect(12)
    failed = sum(lost(rollout).values())
    share = failed / (failed + sum(turn.stop is StopReason.ENV_DONE for turn in rollout.turns))
    assert 0.1 < share < 0.9
    every = Rollout.concat([rollout] * 8)
    FaultLimits(share=share + 0.05).count([], every)
    with pytest.raises(EnvError, match=r"of the last \d+ episodes were lost .*data.init_args.faults.share"):
        FaultLimits(share=share - 0.05).count([], every)
    FaultLimits(share=0.0).count([], rollout)  # too few to tell


def test_all_environments_of_a_rollout_count_for_the_share_of_lost_episodes():
    """A quarter of the episodes is lost, in the last environments: those of one process, say."""
    end = {"terminated": True, "stop": StopReason.ENV_DONE}
    fault = {"truncated": True, "stop": FAULT, "lost": ("died",)}
    turns = [samples.turn(env=env, **(fault if env >= 300 else end)) for env in range(400)]
    rows = [Sample((samples.prompt(1), samples.action(2)), (one,)) for one in turns]
    rollout = Rollout.from_samples(rows)
    FaultLimits(share=0.26).count([], rollout)
    with pytest.raises(EnvError, match="100 of the last 400 episodes were lost"):
        FaultLimits(share=0.24).count([], rollout)


def test_a_resumed_run_counts_lost_episodes_on(tiny_folder):
    with group_data(tiny_folder, faults=FaultLimits(share=0.0)) as data:
        data.stream.collect()  # too few to tell
        state = data.state_dict()
        with pytest.raises(EnvError) as whole:
            data.stream.collect()
    with group_data(tiny_folder, faults=FaultLimits(share=0.0)) as data:
        data.load_state_dict(state)
        Learner(tiny_folder).connect(data)
        with pytest.raises(EnvError) as resumed:
            data.stream.collect()
    assert str(resumed.value) == str(whole.value)
    assert "episodes were lost" in str(whole.value)


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"data.init_args.faults.share must be between 0 and 1, got 2"):
        FaultLimits(share=2)


# What is trained


def test_without_values_the_turns_of_a_lost_episode_are_not_trained_on(tiny_folder):
    def fall(count: int) -> None:
        if count == 3 and len(env.seeds) == 2:
            raise OSError("gone")

    env = Scripted(4, on_step=fall)
    with workplace(tiny_folder, [env, Scripted(9)]) as place:
        rollout = place.collect(9)
    gone = [(turn.env, turn.episode) == (0, 1) for turn in rollout.turns]
    assert sum(gone) == 2
    assert lost_rows(rollout, bootstraps=False, group_size=None).tolist() == gone
    assert not lost_rows(rollout, bootstraps=True, group_size=None).any()
    assert without_rows(rollout, torch.tensor(gone)).trained_mask.any(1).tolist() == [not x for x in gone]


SIZES = GroupRollout(size=3, per_rollout=3, mini_batches=2)
AHEAD = GroupRollout(size=3, per_rollout=3, mini_batches=2, ahead=3, ahead_turns=2)


class Moody(Scripted):
    """Fails in the second step of an episode, by the reply before and the seed; some seeds fail always."""

    def step(self, action: str) -> Any:
        if self.count == 1 and (self.key % 5 == 0 or (len(self.steps[-1]) + self.key) % 3 == 0):
            raise OSError("gone")
        return super().step(action)


class Moodier(Moody):
    """Some seeds do not even begin."""

    def reset(self, **settings: Any) -> Any:
        answer = super().reset(**settings)
        if self.key % 3 == 1:
            raise OSError("no mood to begin")
        return answer


class Shut(Scripted):
    """Half of the seeds do not begin."""

    def reset(self, **settings: Any) -> Any:
        answer = super().reset(**settings)
        if self.key % 2:
            raise OSError("this level is broken")
        return answer


for cls in (Moody, Moodier, Shut):
    gymnasium.register(f"{cls.__name__}-v0", cls)


def group_data(
    folder: Any, groups: GroupRollout | None = SIZES, **settings: Any
) -> AbstractContextManager[RolloutDataModule]:
    own = {"env": EnvConfig("Moody-v0", retries=0), "faults": FaultLimits(share=1.0)}
    return data_module(folder, cast(Any, groups), **(own | settings))


@pytest.mark.parametrize("memory", [pytest.param(WindowMemory(), marks=pytest.mark.slow), FullMemory()])
def test_a_lost_member_is_played_once_more_else_its_group_is_left_out(tiny_folder, memory):
    with group_data(tiny_folder, memory=memory) as data:
        rollouts = [data.stream.collect() for _ in range(4)]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    by_episode: dict[tuple[int, int], list] = {}
    for turn in turns:
        by_episode.setdefault((turn.episode, turn.env), []).append(turn)
    assert len(by_episode) == 4 * 9
    ends = [played[-1].stop for played in by_episode.values()]
    assert set(ends) == {StopReason.ENV_DONE, FAULT}
    total = sum(sum(lost(rollout).values()) for rollout in rollouts)
    assert total > 2 * ends.count(FAULT) > 0  # the others were overcome by the second try
    for rollout in rollouts:
        left_out = lost_rows(rollout, bootstraps=True, group_size=3).tolist()
        broken = {turn.group for turn in rollout.turns if turn.stop is FAULT}
        assert left_out == [sample.turns[0].group in broken for sample in rollout.samples]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [SIZES, AHEAD])
def test_lost_members_are_the_same_whoever_plays_beside_them_and_in_a_resumed_run(tiny_folder, groups):
    rollouts = []
    for num_envs in (1, 32):
        with group_data(tiny_folder, groups, num_envs=num_envs) as data:
            rollouts.append([story(data.stream.collect()) for _ in range(2)])
            state = data.state_dict()
            rollouts[-1] += [story(data.stream.collect()) for _ in range(2)]
    assert rollouts[0] == rollouts[1]
    with group_data(tiny_folder, groups) as data:
        data.load_state_dict(state)
        assert [story(data.stream.collect()) for _ in range(2)] == rollouts[0][2:]


class Swelling(Scripted):
    """Says more at every step."""

    made = 0

    def __init__(self) -> None:
        super().__init__(5)
        Swelling.made += 1

    def _text(self) -> str:
        return super()._text() + " and so on" * 6 * self.count


gymnasium.register("Swelling-v0", Swelling)


def test_an_episode_that_a_resumed_run_with_shorter_prompts_cannot_read_is_played_anew(tiny_folder):
    """Its turns are there, and no state of it stands for the rest."""
    sizes, env = GroupRollout(size=2, per_rollout=2, ahead=2, ahead_turns=3), EnvConfig("Swelling-v0", retries=0)
    with group_data(tiny_folder, sizes, env=env, memory=WindowMemory(0)) as data:
        data.stream.collect()
        shortest = min(len(session.prompt().input) for session in data.sessions)
        state = data.state_dict()
    shorter, Swelling.made = PromptFormat(think=False, max_prompt_tokens=shortest - 1), 0
    with group_data(tiny_folder, sizes, env=env, memory=WindowMemory(0), prompt=shorter) as data:
        data.load_state_dict(state)
        with data.collector.prepare_update():
            at_once = data.state_dict()  # as a run saves it that is asked to end before it has collected
        rollout = data.stream.collect()
        assert Swelling.made == 4  # those of the episodes that cannot go on are used again
    assert lost(rollout) == {"too_long": 4.0}
    with group_data(tiny_folder, sizes, env=env, memory=WindowMemory(0), prompt=shorter) as data:
        data.load_state_dict(at_once)
        again = data.stream.collect()
    assert (story(again), lost(again)) == (story(rollout), lost(rollout))
    assert [turn.index for turn in rollout.turns] == [0, 1, 2] * 4
    assert {turn.stop for turn in rollout.turns if turn.done} == {StopReason.CONTEXT_LENGTH}


def test_a_member_that_no_reset_begins_is_missing_and_counted(tiny_folder):
    sizes = GroupRollout(size=2, per_rollout=6)
    with group_data(tiny_folder, sizes, env=EnvConfig("Shut-v0", retries=0)) as data:
        rollout = data.stream.collect()
    groups = len(set(rollout.groups.tolist()))
    assert 0 < groups < 6
    assert lost(rollout)["OSError"] == 2 * 2 * (6 - groups)
    assert not lost_rows(rollout, bootstraps=False, group_size=2).any()


def test_a_rank_without_a_turn_goes_on_and_notes_its_faults_later(tiny_folder, monkeypatch):
    """Also in a resumed run, with as many ranks or with fewer."""
    sizes, shut = GroupRollout(size=2, per_rollout=2, mini_batches=1), EnvConfig("Shut-v0", retries=0)

    def collected(rank: int, world: int, rollouts: int, state: Any = None) -> tuple[list[Rollout], Any]:
        monkeypatch.setattr(RolloutDataModule, "_rank_and_world", property(lambda self: (rank, world)))
        with group_data(tiny_folder, sizes, env=shut, seed=5) as data:  # rank 0 has no turn in the first rollout
            if state is not None:
                data.load_state_dict(state)
            return [data.stream.collect() for _ in range(rollouts)], data.state_dict()

    whole, _ = collected(0, 1, 2)
    monkeypatch.setattr(FaultLimits, "count", lambda *arguments: [])  # asks all ranks
    (first, second), _ = collected(0, 2, 2)
    assert (len(first), lost(second)["OSError"]) == (0, 4)
    assert story(first) + story(collected(1, 2, 1)[0][0]) == story(whole[0])
    _, state = collected(0, 2, 1)
    (resumed,), _ = collected(0, 2, 1, state)
    assert [(turn.lost, turn.reply) for turn in resumed.turns] == [(turn.lost, turn.reply) for turn in second.turns]
    assert lost(collected(0, 1, 1, state)[0][0])["OSError"] == 4


def test_a_rollout_without_a_turn_on_any_rank_stops_the_run():
    with pytest.raises(EnvError, match="the environments failed in all groups of this rollout"):
        FaultLimits(share=1.0).count([], Rollout.from_samples([]))


class OnceLost(Scripted):
    """Cannot be repeated, and fails once, where a group is begun ahead."""

    deterministic = False
    failures = 0

    def __init__(self) -> None:
        super().__init__(5)

    def step(self, action: str) -> Any:
        if OnceLost.failures and self.count == 1:
            OnceLost.failures -= 1
            raise IndexError("lost")
        return super().step(action)


gymnasium.register("OnceLost-v0", OnceLost)


def test_what_is_left_of_a_last_try_that_cannot_be_resumed_is_not_taken_for_an_episode(tiny_folder):
    sizes = GroupRollout(size=2, per_rollout=1, mini_batches=1, ahead=1, ahead_turns=2)
    settings: dict[str, Any] = {"env": EnvConfig("OnceLost-v0", retries=0), "num_envs": 1}
    OnceLost.failures = 0
    with group_data(tiny_folder, sizes, **settings) as data:
        play = WholeGroups._play

        async def failing(self: WholeGroups, group: int, *others: Any) -> None:
            OnceLost.failures = int(group == 1 and not self._members.get(1))
            await play(self, group, *others)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(WholeGroups, "_play", failing)
            data.stream.collect()
        state = data.state_dict()
    begun = state["sessions"][1]
    assert [(member["lost"], len(member["samples"])) for member in begun] == [(["IndexError"], 2), ([], 2)]
    with group_data(tiny_folder, sizes, **settings) as data:
        data.load_state_dict(state)
        rollout = data.stream.collect()
    assert [turn.index for turn in rollout.turns] == [0, 1, 2, 3, 4]  # of the other member
    assert lost(rollout) == {"IndexError": 1, "replay": 2}
    assert lost_rows(rollout, bootstraps=True, group_size=2).all()


def test_a_lost_greedy_episode_leaves_its_group_out(tiny_folder):
    class Greedy(Learner):
        greedy_baseline = True

    with group_data(tiny_folder, learner=Greedy(tiny_folder)) as data:
        rollouts = [data.stream.collect() for _ in range(4)]
    rollout = Rollout.concat(rollouts)
    nan = rollout.greedy_scores.isnan()
    assert nan.any()
    assert not nan.all()
    gone = lost_rows(rollout, bootstraps=True, group_size=3)
    assert gone[nan].all()
    assert without_rows(rollout, gone).greedy_scores.isfinite().all()


# Exact resume


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param(WindowMemory(), marks=pytest.mark.slow), FullMemory()])
def test_a_resumed_run_with_faults_goes_on_as_the_uninterrupted_one(tiny_folder, memory):
    settings: dict[str, Any] = {"num_envs": 4, "turns_per_env": 3, "mini_batch_turns": 6, "memory": memory}
    settings |= {"env": EnvConfig("Moodier-v0", retries=0), "groups": None, "faults": FaultLimits(99, 1.0)}

    def turns_of_next(data: RolloutDataModule) -> list[tuple]:
        rollout = data.stream.collect()
        return [(*of_turn, turn.lost) for of_turn, turn in zip(story(rollout), rollout.turns, strict=True)]

    states, expected = [], []
    with group_data(tiny_folder, **settings) as data:
        for _ in range(6):
            states.append(data.state_dict())
            expected.append(turns_of_next(data))
    assert any(turn[-1] for turns in expected for turn in turns)
    assert any(session["lost"] for state in states for session in state["sessions"].values())
    for state, then in zip(states[1:], expected[1:], strict=True):
        with group_data(tiny_folder, **settings) as data:
            data.load_state_dict(state)
            assert turns_of_next(data) == then


# Validation


def test_a_lost_held_out_episode_is_a_failure_and_reported_apart(tiny_folder):
    with group_data(tiny_folder, validation=ValidationConfig(12, 4)) as data:
        results = play_held_out(data, data.val_dataloader().seeds)
    broken = [result for result in results if result.lost]
    assert 0 < len(broken) < 12
    assert {(result.success, result.turns, result.total_reward) for result in broken} == {(False, 1, 1.0)}
    assert all(result.success for result in results if not result.lost)


def test_episodes_without_end_have_a_limit_where_they_are_played_whole(tiny_folder, monkeypatch):
    monkeypatch.setattr("lightning_agentrl.rollout.player.WHOLE_EPISODE_TURNS", 5)
    with workplace(tiny_folder, [Scripted(10**9)]) as place:
        assert len(place.collect(7).turns) == 7
        turns = place.episode(place.session(1, Scripted(10**9)))
        assert len(place.episode(place.session(2, Scripted(3)))) == 3
    assert [turn.stop for turn in turns] == [None] * 4 + [StopReason.MAX_TURNS]
    assert turns[-1].bootstrap is not None


# What is too long, and what could not be read


class Shouting(Scripted):
    """Says far more than a prompt can hold in one step of each episode."""

    def __init__(self, length: int, loud: int) -> None:
        super().__init__(length)
        self.loud = loud

    def _text(self) -> str:
        return super()._text() + " wall" * 3000 * (self.count == self.loud)


@pytest.mark.parametrize("memory", [WindowMemory(), FullMemory()])
def test_one_observation_that_is_too_long_truncates_its_episode(memory, tiny_folder):
    with workplace(tiny_folder, [Shouting(9, loud=2)], memory=memory) as place:
        rollouts = [place.collect(count) for count in (3, 2, 1)]
        before = place.engine.log[1][0].prompt
    full = StopReason.CONTEXT_LENGTH
    assert [places(rollout) for rollout in rollouts] == [
        [(0, 0, None), (0, 1, full), (1, 0, None)],
        [(1, 1, full), (2, 0, None)],
        [(2, 1, full)],
    ]
    assert input_of(rollouts[0].turns[1].bootstrap) == before  # the last that could be read
    assert lost(rollouts[0]) == {}
    with (
        workplace(tiny_folder, [Shouting(9, loud=0)], memory=memory) as place,
        pytest.raises(EnvError, match="lost 6 episodes in a row") as error,
    ):
        place.collect(1)
    assert error.value.kind == "too_long"


def test_an_episode_has_a_budget_of_reply_tokens(tiny_folder):
    loop = TurnInteraction(4, RawParser(), reply_budget=10)
    with workplace(tiny_folder, [Scripted(99)], interaction=loop) as place:
        rollout = place.collect(12)
        asked = [request.max_tokens for request, _ in place.engine.log]
    used: dict[int, int] = {}
    for sample, most in zip(rollout.samples, asked, strict=True):
        (turn,) = sample.turns
        assert most == min(4, 10 - used.get(turn.episode, 0))
        used[turn.episode] = used.get(turn.episode, 0) + len(sample.actions[0])
        assert (turn.stop is StopReason.REPLY_BUDGET) == (used[turn.episode] == 10)
        assert (turn.bootstrap is not None) >= turn.done
    assert max(used) >= 2


def test_an_episode_that_is_resumed_with_a_smaller_budget_ends_with_its_next_reply(tiny_folder):
    with workplace(tiny_folder, [Scripted(99)]) as place:
        used = sum(len(sample.actions[0]) for sample in place.collect(2).samples)
        state = place.sessions[0].state_dict()
    assert used > 1
    with workplace(tiny_folder, [Scripted(99)], interaction=TurnInteraction(4, RawParser(), reply_budget=1)) as place:
        place.sessions[0].load_state_dict(state)
        rollout = place.collect(2)
    assert [len(sample.actions[0]) for sample in rollout.samples] == [1, 1]
    assert places(rollout) == [(0, 2, StopReason.REPLY_BUDGET), (1, 0, StopReason.REPLY_BUDGET)]


class Second(ActionParser):
    """Reads nothing in the first reply to an observation, and an action in those after it."""

    def __init__(self) -> None:
        self.replies = 0

    def parse(self, reply, actions, aliases):
        self.replies += 1
        return RawParser().parse("left" if self.replies % 2 == 0 else "", actions, aliases)


@pytest.mark.parametrize("memory", [WindowMemory(2), FullMemory()])
def test_a_reply_that_could_not_be_read_is_asked_for_again(memory, tiny_folder):
    loop = TurnInteraction(4, Second(), ask_again=1, max_turns=3)
    env = Scripted(99)
    with workplace(tiny_folder, [env], interaction=loop, memory=memory) as place:
        rollout = place.collect(9)
        prompts = [place.text(request.prompt.ids) for request, _ in place.engine.log]
        log = {request.prompt: reply for request, reply in place.engine.log}
    turns = rollout.turns
    assert [turn.asked_again for turn in turns] == [True, False] * 4 + [True]
    assert env.steps == ["left"] * 4
    assert [(t.episode, t.index) for t in turns] == [(0, i) for i in range(6)] + [(1, i) for i in range(3)]
    assert [turn.reward for turn in turns] == [-0.1, 1.0, -0.1, 2.0, -0.1, 3.0, -0.1, 1.0, -0.1]
    assert [turn.stop for turn in turns] == [None] * 5 + [StopReason.MAX_TURNS] + [None] * 3
    notes = [prompt.rsplit("key", 1)[0].rstrip().endswith("named no action.") for prompt in prompts]
    assert notes == [turn.index % 2 == 1 for turn in turns]
    assert turns[0].observation == turns[1].observation
    assert len({request.seed for request, _ in place.engine.log}) == 9
    for sample in rollout.samples:
        before = ModelInput()
        for segment in sample.segments:
            if segment.is_action:
                assert segment.ids == log[before].ids  # the engine read exactly the tokens before
            before += segment.input
    with pytest.raises(ValueError, match="ask_again must be at least 0, got -1"):
        TurnInteraction(ask_again=-1)
    with pytest.raises(ValueError, match="reply_budget must be at least 1, got 0"):
        TurnInteraction(reply_budget=0)


class Graded(Scripted):
    """Tells at every step how far it is, and that it is not solved."""

    def step(self, action: str) -> Any:
        *answer, info = super().step(action)
        return (*answer, info | {"success": False, "progression": 0.25})


def test_an_episode_that_ends_at_an_unread_reply_ended_as_the_environment_told_last(tiny_folder):
    """The sum of its rewards is above 0, which counts as success where an environment tells nothing."""
    loop = TurnInteraction(4, Second(), ask_again=1, reply_budget=12)
    with workplace(tiny_folder, [Graded(99)], interaction=loop) as place:
        turns = place.episode(place.session(0, Graded(99)))
    assert turns[-1].asked_again
    assert turns[-1].stop is StopReason.REPLY_BUDGET
    result = summarise(turns)
    assert result.total_reward > 0
    assert (result.success, result.progression) == (False, 0.25)


def test_an_observation_that_is_shown_once_more_is_still_the_first(tiny_folder):
    """A tool's answer needs a call before it, which a memory that shows no unread reply does not show."""
    env = Scripted(99)
    env.observation_role = "tool"
    loop = TurnInteraction(4, Second(), ask_again=1)
    with workplace(tiny_folder, [env], interaction=loop, memory=WindowMemory(2)) as place:
        (turn,) = place.collect(1).turns
        assert turn.asked_again
        assert place.sessions[0].prompt().observation.role == "user"
