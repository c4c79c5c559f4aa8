"""Environments in threads, inline and in processes: the same answers and errors, and nothing that holds up a run."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from lightning_agentrl.episodes import env_process
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import EnvWorker, ReplayDiffersError, Start
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.errors.faults import EnvError
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.rollout import EnvConfig, GroupRollout, RawParser, RolloutDataModule, TurnInteraction
from lightning_agentrl.tools.check_env.certificate import certify
from tests.episodes.small_envs import Walk
from tests.rollout.scripted import FREE_TEXT, Learner, Workplace, story, workplace

START = Start(env=3, episode=0, seed=5)
HANGS = 1.0  # seconds after which a call hangs, and the most that tests wait for it
MANY = 20  # retries, for machines on which a call may take that long by itself


def config(name: str = "Walk", worker: str | None = "process", retries: int = 2, **settings: Any) -> EnvConfig:
    timeout = settings.pop("timeout_seconds", None)
    env_id = f"tests.episodes.small_envs:{name}-v0"
    return EnvConfig(env_id, settings, retries, worker=worker, timeout_seconds=timeout)


@contextmanager
def opened(*args: Any, **settings: Any) -> Iterator[EnvWorker]:
    """A worker as a data module makes it."""
    with ThreadPoolExecutor(1) as executor, closing(config(*args, **settings).make_worker(executor)) as worker:
        yield worker


def process_of(worker: EnvWorker) -> subprocess.Popen[bytes]:
    environment = worker._environment
    assert isinstance(environment, env_process.ProcessEnvironment)
    return environment._process


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended; who should collect it may be busy."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def members(group: int) -> list[str]:
    """Running processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            found += [stat.parent.name] if int(of_group) == group and state != "Z" else []
    return found


def replace_sessions(place: Workplace, *configs: EnvConfig) -> None:
    place.sessions = [
        Session(i, source.make_worker(place.executor), old.episode_seed, place.renderer, place.memory)
        for i, (source, old) in enumerate(zip(configs, place.sessions, strict=True))
    ]


# The same in all places


def test_a_process_plays_as_a_thread_does_and_goes_on_from_its_state(tiny_folder):
    """Observations, actions that change from turn to turn, pictures; and a saved thread continues in a process."""

    def play(first: str, then: str) -> tuple[list, list]:
        with workplace(tiny_folder, [Walk()]) as place:
            replace_sessions(place, config("Changing", first, length=5))
            rollouts = [place.collect(7)]
            (state,) = [session.state_dict() for session in place.sessions]
            place.sessions[0].worker.close()
            replace_sessions(place, config("Changing", then, length=5))
            place.sessions[0].load_state_dict(state)
            rollouts.append(place.collect(4))
            place.sessions[0].worker.close()
        return [story(rollout) for rollout in rollouts], [turn.image for r in rollouts for turn in r.turns]

    expected = play("thread", "thread")
    assert play("process", "thread") == expected
    assert play("thread", "process") == expected
    assert None not in expected[1]


@pytest.mark.slow
def test_groups_hand_processes_over(tiny_folder, monkeypatch):
    def play(worker: str) -> list:
        groups = GroupRollout(size=2, per_rollout=1, mini_batches=1)
        interaction = TurnInteraction(4, RawParser())
        data = RolloutDataModule(config(worker=worker), 2, groups=groups, prompt=FREE_TEXT, interaction=interaction)
        started.clear()
        data.setup("fit")
        Learner(tiny_folder).connect(data)
        try:
            return [story(data.stream.collect()) for _ in range(3)]
        finally:
            data.teardown("fit")

    started: list[str] = []
    start = env_process.ProcessEnvironment.__init__
    monkeypatch.setattr(
        env_process.ProcessEnvironment, "__init__", lambda *args: (started.append("one"), start(*args))[1]
    )
    expected = play("thread")
    assert started == []
    assert play("process") == expected
    assert len(started) == 2  # for six episodes, two at a time


@pytest.mark.slow
def test_a_process_loads_neither_torch_nor_transformers_and_hashes_as_all_do():
    facts = []
    for _ in range(2):
        with opened("Telling") as worker:
            facts.append(worker.reset_now(START).observation.split())
    assert facts[0][0] != str(os.getpid())
    assert facts[0][1:3] == facts[1][1:3]
    assert facts[0][1] == "0"
    modules = set(facts[0][3:])
    assert "lightning_agentrl.episodes.env_process" in modules
    assert not modules & {"torch", "transformers", "lightning", "jsonargparse"}


@pytest.mark.slow
def test_global_generators_repeat_an_episode_in_a_process():
    seen = []
    for seed in (5, 5, 6):
        with opened("Gambling", worker=None) as worker:
            seen.append([worker.reset_now(Start(0, 0, seed)).observation, asyncio.run(worker.step("left")).observation])
    assert seen[0] == seen[1]
    assert not set(seen[0]) & set(seen[2])
    assert seen[0][0] != seen[0][1]


# What goes wrong in an environment


@pytest.mark.slow
@pytest.mark.parametrize("place", ["thread", "process"])
def test_whatever_an_environment_raises_is_an_error_with_its_place(place):
    """Also what would end a thread, a task, the event loop or the process. The environment is still there."""

    async def errors() -> list[EnvError]:
        await worker.reset(START)
        await worker.step("left")
        caught = []
        for fault in ("raises", "leaves", "stops", "cancels"):
            with pytest.raises(EnvError) as error:
                await worker.step(fault)
            caught.append(error.value)
        assert (await worker.step("left")).reward == 2.0
        return caught

    with opened(worker=place, retries=0) as worker:
        caught = asyncio.run(errors())
    kinds = ["IndexError", "SystemExit", "StopIteration", "CancelledError"]
    assert [error.kind for error in caught] == kinds
    assert str(caught[0]) == "the environment raised IndexError: list index out of range"
    assert caught[0].__notes__ == ["environment 3, episode 0 with seed 5, in turn 1, action 'raises'"]
    for error, kind in zip(caught, kinds, strict=True):
        frames = [line for line in error.trace.splitlines() if line.startswith("  File ")]
        assert frames
        assert not [line for line in frames if "small_envs.py" not in line], error.trace
        assert kind in error.trace.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("exits", "died", "process ended in step with exit code 3"),
        pytest.param("exits beside a child", "died", "process ended in step with exit code 3", marks=pytest.mark.slow),
        pytest.param("aborts", "died", "process ended in step by signal SIGABRT", marks=pytest.mark.slow),
        ("hangs", "timeout", r"step took longer than 1 s, .* data\.init_args\.env\.timeout_seconds"),
        pytest.param("hangs and holds the interpreter", "timeout", "step took longer than 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_or_hangs_is_replaced_within_the_retries(fault, kind, message, tmp_path):
    async def play() -> str:
        await worker.reset(START)
        return [(await worker.step(action)).observation for action in ("left", "right", "left")][-1]

    limit = HANGS if kind == "timeout" else None
    once = str(tmp_path / "happened")
    with opened(worker="thread") as worker:
        expected = asyncio.run(play())
    with opened(retries=MANY, fault=fault, once=once, timeout_seconds=limit) as worker:
        first = process_of(worker)
        with pytest.warns(UserWarning, match=rf"{message}.* in turn 1, action 'right'\); trying again"):
            assert asyncio.run(play()) == expected
        assert gone(first.pid)
        wait_for(lambda: not members(first.pid))
        assert set(worker.take_errors()) == {kind}
        assert worker.take_errors() == ()


@pytest.mark.slow
def test_processes_close_beside_each_other(tmp_path):
    """Each closes once all do; one that is not let go on within its time would warn."""
    pool = EnvPool([config("Together", folder=str(tmp_path), count=3)], 3)
    workers = [pool.take(0) for _ in range(3)]
    for worker in workers:
        worker.reset_now(START)
        pool.give_back(0, worker)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.close()
    assert all(gone(process_of(worker).pid) for worker in workers)


@pytest.mark.slow
def test_a_call_over_its_time_ends_the_process_also_beyond_the_retries():
    with opened(retries=0, fault="hangs", at=0, timeout_seconds=HANGS) as worker:
        with pytest.raises(EnvError, match="took longer than") as error:
            worker.reset_now(START)
        assert error.value.kind == "timeout"
        wait_for(lambda: gone(process_of(worker).pid))


@pytest.mark.slow
def test_a_run_goes_on_beside_a_process_that_hangs_and_one_that_ends(tiny_folder, tmp_path):
    """All turns are there, as if nothing had happened, and both errors are counted."""
    with workplace(tiny_folder, [Walk(), Walk(), Walk()]) as place:
        expected = story(place.collect(5))
    hanging = {"fault": "hangs", "once": str(tmp_path / "hung"), "timeout_seconds": HANGS, "retries": MANY}
    ending = {"fault": "exits", "at": 3, "once": str(tmp_path / "ended")}
    with workplace(tiny_folder, [Walk(), Walk(), Walk()]) as place:
        replace_sessions(place, config(**hanging), config(**ending), config(worker="thread"))
        with pytest.warns(UserWarning, match="trying again"):
            rollout = place.collect(5)
        for session in place.sessions:
            session.worker.close()
    assert story(rollout) == expected
    numbers = {name: float(number.total) for name, number in rollout_numbers(rollout).items() if "env/" in name}
    assert numbers["env/errors/timeout"] >= 1.0
    assert numbers["env/errors/died"] == 1.0
    assert numbers["env/retries"] == numbers["env/errors/timeout"] + 1.0


@pytest.mark.slow
def test_the_budget_is_of_one_call_and_what_is_beyond_it_costs_the_episode(tiny_folder):
    with workplace(tiny_folder, [Walk()]) as place:
        replace_sessions(place, config(fault="exits", at=3, retries=1))
        with pytest.warns(UserWarning, match="its episode is lost") as caught:
            rollout = place.collect(3)
        place.sessions[0].worker.close()
    again, lost = (str(warning.message) for warning in caught)
    assert again.endswith("trying again")
    assert lost.startswith("the environment's process ended in step with exit code 3 (environment 0, episode 0 with")
    assert "in turn 2, action" in lost
    assert [turn.stop for turn in rollout.turns] == [None, "env_fault", None]


@pytest.mark.slow
def test_a_process_that_cannot_be_replayed_is_refused():
    """This one tells its number, which no seed decides."""

    async def play() -> None:
        await worker.reset(START)
        await worker.step("exits")

    message = "environment 3 does not repeat its episode"
    with (
        opened("Telling") as worker,
        pytest.warns(UserWarning, match="trying again"),
        pytest.raises(ReplayDiffersError, match=message) as error,
    ):
        asyncio.run(play())
    assert error.value.__cause__.kind == "died"


@pytest.mark.slow
def test_an_answer_that_cannot_be_sent_names_the_entry():
    async def play() -> None:
        await worker.reset(START)
        await worker.step("left")

    with opened("Locked") as worker, pytest.raises(EnvError, match=r"info\['lock'\] cannot be sent .*; use plain"):
        asyncio.run(play())
    with opened("Locked", worker="thread") as worker:
        asyncio.run(play())


# How a process ends


@pytest.mark.slow
@pytest.mark.parametrize("place", ["thread", "process"])
def test_an_environment_is_closed_and_its_complaint_is_a_warning(place, tmp_path):
    once = str(tmp_path / "closed")
    with opened("Closing", worker=place, once=once) as worker:
        worker.reset_now(START)
        assert not Path(once).exists()
    assert Path(once).exists()
    with pytest.warns(UserWarning, match="OSError: was gone already"), opened("Stubborn", worker=place) as worker:
        worker.reset_now(START)


@pytest.mark.slow
def test_a_cancelled_call_ends_its_process_and_a_later_one_goes_on(tmp_path):
    once = tmp_path / "hanging"

    async def cancelled() -> None:
        await worker.reset(START)
        await worker.step("left")
        step = asyncio.create_task(worker.step("right"))
        while not once.exists():
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    with opened(fault="hangs", once=str(once)) as worker:
        first = process_of(worker)
        asyncio.run(cancelled())
        wait_for(lambda: gone(first.pid))
        assert worker.actions == ["left"]
        assert asyncio.run(worker.step("right")).reward == 2.0
        assert worker.take_errors() == ()


def test_ctrl_c_is_not_heard():
    with opened(retries=0) as worker:
        worker.reset_now(START)
        for _ in range(3):
            os.kill(process_of(worker).pid, signal.SIGINT)
            assert worker.reset_now(START).reward == 0.0
        assert os.getpgid(process_of(worker).pid) != os.getpgrp()


@pytest.mark.slow
def test_a_process_ends_with_a_trainer_that_is_killed(tmp_path):
    """Even one that hangs and never lets go of the interpreter."""
    once = tmp_path / "hanging"
    script = f"""
from lightning_agentrl.episodes.env_process import ProcessEnvironment, Recipe
fault = {{"fault": "hangs and holds the interpreter", "at": 1, "once": {str(once)!r}}}
environment = ProcessEnvironment(Recipe("tests.episodes.small_envs:Walk-v0", fault, "env"))
environment.reset(0)
print(environment._process.pid, flush=True)
environment.step("left")
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        wait_for(once.exists)
        assert not gone(pid)
        trainer.kill()
    wait_for(lambda: gone(pid))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed", "exits", "hangs", "trainer killed", "check-env"])
def test_descendants_of_an_environment_end_with_it(end, tmp_path):
    """Children, children in sessions of their own, and orphans, however the environment ends."""
    settings: dict[str, Any] = {"folder": str(tmp_path)}
    if end == "trainer killed":
        script = f"""
from lightning_agentrl.episodes.env_process import ProcessEnvironment, Recipe
environment = ProcessEnvironment(Recipe("tests.episodes.small_envs:Parent-v0", {settings!r}, "env"))
environment.reset(0)
print("begun", flush=True)
input()
"""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", script], **pipes) as trainer:
            assert trainer.stdout.readline() == b"begun\n"
            trainer.kill()
    elif end == "check-env":
        certify("tests.episodes.small_envs:Parent-v0", settings, seconds=1.0)
    else:
        settings["fault"] = "" if end == "closed" else end
        with opened("Parent", retries=0, at=1, **settings) as worker:
            worker.reset_now(START)
            if end != "closed":
                worker._environment._timeout = 0.2 if end == "hangs" else None
                with pytest.raises(EnvError):
                    asyncio.run(worker.step("left"))
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 4
    try:
        wait_for(lambda: all(map(gone, pids)))
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# Which place


@pytest.mark.parametrize(("worker", "asks_itself"), [(None, True), ("thread", False)])
def test_an_environment_may_run_inline_and_a_key_decides_otherwise(worker, asks_itself):
    with opened("Quick", worker) as made:
        observation = asyncio.run(made.reset(START)).observation
    assert (observation == f"in thread {threading.get_ident()}") is asks_itself


def test_a_need_for_a_process_cannot_be_denied():
    with pytest.raises(ValueError, match=r"needs a separate process .*data\.init_args\.env\.worker"):
        config("Gambling", "thread").make_worker()
    with (
        pytest.raises(EnvError, match=r"its class does not declare it .*key worker to process"),
        opened("Late", None) as worker,
    ):
        worker.reset_now(START)
    with opened("Late") as worker:
        assert worker.reset_now(START).contract.worker == "process"


def test_a_time_limit_needs_a_process():
    sentence = (
        r"timeout_seconds 5 needs a process, since a thread cannot be stopped; set data\.init_args\.env\.worker to"
    )
    with pytest.raises(ValueError, match=sentence):
        config("Walk", "thread", timeout_seconds=5).check()
    for name in ("Walk", "Quick"):
        with pytest.raises(ValueError, match=sentence):
            config(name, None, timeout_seconds=5).make_worker()
    with opened("Gambling", None, timeout_seconds=60) as worker:
        worker.reset_now(START)
    with pytest.raises(ValueError, match=r"env\.timeout_seconds must be above 0 or null, got 0"):
        config(timeout_seconds=0).check()
    with pytest.raises(ValueError, match=r"env\.worker must be thread, process or null, got 'fork'"):
        config(worker="fork").check()


# What cannot be made in another process


def test_arguments_that_cannot_be_sent_are_refused():
    with pytest.raises(
        ValueError, match=r"cannot be sent to its process: .*lock.* \(key data\.init_args\.env\.kwargs\)"
    ):
        config(info={"lock": threading.Lock()}).make_worker()


class Unreadable:
    """Can be pickled, but not read again elsewhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_arguments_that_cannot_be_read_there_are_refused():
    assert pickle.dumps(Unreadable())
    with warnings.catch_warnings(), opened(info=Unreadable()) as worker:
        warnings.simplefilter("error")  # it is not tried again
        with pytest.raises(ValueError, match=r"cannot be sent to its process: ValueError: .*env\.worker to thread"):
            worker.reset_now(START)


def test_an_environment_of_the_started_script_is_refused(monkeypatch):
    class Local(Walk):
        pass

    Local.__module__ = "__main__"
    for name, entry in (("Here-v0", Local), ("HereToo-v0", "__main__:Local")):
        monkeypatch.setitem(gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, entry))
        with pytest.raises(ValueError, match=rf"'{name}' is registered in the main script.* module:{name}"):
            EnvConfig(name, worker="process").make_worker()


@pytest.mark.slow
def test_an_id_that_only_this_process_has_registered_is_known_there():
    with closing(EnvConfig("Walk-v0", {"length": 7}, worker="process").make_worker()) as worker:
        assert worker.reset_now(START).observation.endswith("step 0")
    with closing(EnvConfig("Walk", {"length": 7}, worker="process").make_worker()) as worker:  # the newest version
        assert worker.reset_now(START).observation.endswith("step 0")


@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param("Nothing", {}, marks=pytest.mark.slow), ("Walk", {"lenght": 3})]
)
def test_an_environment_that_cannot_be_made_is_told_as_in_a_thread(name, settings):
    messages = []
    for place in ("thread", "process"):
        with (
            pytest.raises(ValueError, match=r"data\.init_args\.env") as error,
            opened(name, place, **settings) as worker,
        ):
            worker.wait()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_a_picture_that_fails_is_drawn_by_the_environment_that_is_made_anew(worker: str, tmp_path: Path) -> None:
    with (
        opened("Blind", worker=worker, retries=1, once=str(tmp_path / "made")) as blind,
        opened(worker="thread") as walk,
    ):
        for one in (blind, walk):
            asyncio.run(one.reset(START))
            asyncio.run(one.step("left"))
        with pytest.warns(UserWarning, match="no display.*trying again"):
            picture = asyncio.run(blind.draw())
        assert picture == asyncio.run(walk.draw())
        assert blind.take_errors() == ("RuntimeError",)
