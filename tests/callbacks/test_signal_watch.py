"""Signals are seen at once, whatever the main thread waits for. In processes of their own, which they end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_agentrl.callbacks import StopOnSignals, stop_on_signals
from lightning_agentrl.rollout.stopping import Stopping
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import next_port

ENDS, SAVES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), (signal.SIGUSR1,)


passed_on: list[int] = []  # to processes that this one has started


def begin(grace: float = 60.0) -> Stopping:
    """Start the callback as a trainer does."""
    stopping = Stopping()
    trainer: Any = SimpleNamespace(
        datamodule=SimpleNamespace(stopping=stopping),
        strategy=SimpleNamespace(launcher=SimpleNamespace(kill=passed_on.append)),
        state=SimpleNamespace(fn=None),
        current_epoch=0,
    )
    stopping.watch = StopOnSignals(grace)  # type: ignore[attr-defined]
    stopping.watch._begin(trainer)  # type: ignore[attr-defined]
    return stopping


def child(work: Callable[[], int | None], log: Path) -> int:
    """Start a process of its own that does some work; its number."""
    if pid := os.fork():
        return pid
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    code = 99
    try:
        code = work() or 0
    finally:
        os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


def test_a_main_thread_that_never_comes_back_from_c_is_ended_after_its_grace(tmp_path):
    def work() -> None:
        begin(grace=0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # nobody gives it back, and no signal interrupts it
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    assert code_of(child(work, tmp_path / "log")) == 143
    assert "could not save within 0.3 s" in (tmp_path / "log").read_text()


def test_a_second_signal_ends_at_once_but_one_that_comes_twice_is_one(tmp_path, monkeypatch):
    def work() -> None:
        stopping = begin()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: stopping.asked == signal.SIGTERM)
        time.sleep(0.4)
        os.write(2, b"still here; ")
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(stop_on_signals, "SECOND_AFTER", 0.6)
    started = time.monotonic()
    assert code_of(child(work, tmp_path / "log")) == 143
    assert time.monotonic() - started < 30
    assert (
        (tmp_path / "log")
        .read_text()
        .endswith("still here; agentrl: stopped: SIGTERM received, and a second signal ended the run at once\n")
    )


def test_what_is_written_to_a_terminal_that_is_gone_is_no_error(tmp_path):
    """An error would end the run before it is saved. What somebody still reads stays."""

    def work() -> None:
        keeper, terminal = os.openpty()
        os.dup2(terminal, 1)
        os.close(keeper)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(1, b"lost")
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may be started with nohup
        stopping = begin()
        os.kill(os.getpid(), signal.SIGHUP)
        assert wait_for(lambda: stopping.asked == signal.SIGHUP)
        os.write(1, b"nowhere")
        os.write(2, b"here")

    assert code_of(child(work, tmp_path / "log")) == 0
    assert (tmp_path / "log").read_text().endswith("here")


def test_sigusr1_asks_to_save_and_nothing_else(tmp_path):
    def work() -> int:
        stopping = begin(grace=0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait_for(lambda: stopping.saves == 1)
        time.sleep(0.5)
        return 7 if not stopping.asked else 8

    assert code_of(child(work, tmp_path / "log")) == 7


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (*ENDS, *SAVES)]
    stopping = begin()
    assert [signal.getsignal(number) for number in (*ENDS, *SAVES)] != before
    stopping.watch._close()  # type: ignore[attr-defined]
    assert [signal.getsignal(number) for number in (*ENDS, *SAVES)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.slow
def test_handlers_that_lightning_has_put_back_are_left(tiny_folder, tmp_path):
    """It does so before callbacks are taken down; its own would only take note of SIGTERM."""
    before = [signal.getsignal(number) for number in (*ENDS, *SAVES)]
    make_trainer(tmp_path, 1, [StopOnSignals()]).fit(make_agent(tiny_folder), make_data())
    assert [signal.getsignal(number) for number in (*ENDS, *SAVES)] == before


def test_the_signal_of_a_forked_process_is_its_own(tmp_path):
    stopping = begin()
    try:
        marker = tmp_path / "runs"
        pid = child(lambda: marker.touch() or time.sleep(60), tmp_path / "log")
        assert wait_for(marker.exists)
        os.kill(pid, signal.SIGTERM)
        assert code_of(pid) == -signal.SIGTERM
        time.sleep(0.1)
        assert not stopping.asked
    finally:
        stopping.watch._close()  # type: ignore[attr-defined]


def test_processes_that_this_one_has_started_get_its_signals(tmp_path):
    def work() -> int:
        begin()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return 7 if wait_for(lambda: passed_on == [signal.SIGUSR1, signal.SIGTERM]) else 8

    assert code_of(child(work, tmp_path / "log")) == 7


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["grace", "second signal"])
def test_a_rank_ends_although_the_one_that_it_waits_for_is_stopped(tmp_path, monkeypatch, twice):
    address, marker = f"tcp://127.0.0.1:{next_port()}", tmp_path / "stopped"
    monkeypatch.setattr(stop_on_signals, "SECOND_AFTER", 0.1)

    def work(rank: int) -> Callable[[], None]:
        def inner() -> None:
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
            begin(grace=60.0 if twice else 1.0)
            dist.barrier()  # the other one has met this one too
            if rank == 0:
                marker.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            assert wait_for(marker.exists)
            threading.Thread(target=signals, args=(1 + twice,), daemon=True).start()
            dist.barrier()

        return inner

    def signals(count: int) -> None:
        for _ in range(count):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

    pids = [child(work(rank), tmp_path / f"log{rank}") for rank in (0, 1)]
    started = time.monotonic()
    assert code_of(pids[1]) == 0  # the first one says how it ended
    os.kill(pids[0], signal.SIGKILL)
    assert code_of(pids[0]) == -signal.SIGKILL
    assert time.monotonic() - started < 40
    assert ("a second signal ended" if twice else "could not save") in (tmp_path / "log1").read_text()
