"""A run that is told to end saves what it needs to go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_agentrl.callbacks import EngineCheck, StopOnSignals
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.errors import EngineGoneError
from lightning_agentrl.rollout.stopping import Stopped
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.processes import config_text, next_port
from tests.callbacks.continued_runs import MODES, assert_same_chain, assert_same_end, in_processes, run, turns
from tests.callbacks.signalling import SignalAt

Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> Whole:
    """Folders of runs without a signal."""
    made: dict[tuple[str, int], Path] = {}

    def of(mode: str, devices: int = 1) -> Path:
        if (mode, devices) not in made:
            path = made[mode, devices] = tmp_path_factory.mktemp("whole")
            if devices == 1:
                run(path, exact_folder, mode)
            else:
                assert in_processes(path, exact_folder, mode, devices=devices) == [0] * devices
        return made[mode, devices]

    return of


SLOW = [
    *(("windowed", "collect", 2), ("windowed", "validate", 2), ("windowed", "update", 1)),
    *(("groups ahead", "collect", 2), ("ahead", "update", 3)),
]
STAGES = [
    *(("collect", 0), ("score", 0), ("update", 0), ("update", 1), ("collect", 2), ("validate", 2)),
    *(("score", 3), ("update", 3), ("validate", 3)),
]


def had_ended(saved: Path, last: Path) -> bool:
    """Whether the run ended after its last update, so that the checkpoint of the signal is the last one."""
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (saved, last)]
    return steps[0] == steps[1]


CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.long)
    for case in ((mode, *place) for mode in MODES for place in STAGES)
]


@pytest.mark.parametrize(("mode", "stage", "iteration"), CASES)
def test_a_run_that_was_told_to_end_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, exact_folder: Path, whole: Whole, mode: str, stage: str, iteration: int
) -> None:
    with pytest.raises(Stopped) as error:
        run(tmp_path, exact_folder, mode, StopOnSignals(), SignalAt(stage, iteration, 5 if stage == "collect" else 1))
    assert error.value.code == 128 + signal.SIGTERM
    (saved,) = tmp_path.glob("stopped-*.ckpt")
    last = run(tmp_path, exact_folder, mode, start=saved)
    assert_same_end(whole(mode) / "last.ckpt", last, counters=not had_ended(saved, last))
    assert turns(whole(mode)) == turns(tmp_path)
    assert_same_chain(whole(mode), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["windowed", "ahead", "groups"])
@pytest.mark.parametrize(("stage", "iteration"), STAGES)
def test_a_signal_to_one_of_two_processes_alone(
    tmp_path: Path, exact_folder: Path, whole: Whole, mode: str, stage: str, iteration: int
) -> None:
    signalling = [StopOnSignals(), SignalAt(stage, iteration, rank=1)]
    assert in_processes(tmp_path, exact_folder, mode, signalling, devices=2) == [143, 0]
    (saved,) = tmp_path.glob("stopped-*.ckpt")
    assert in_processes(tmp_path, exact_folder, mode, start=saved, devices=2) == [0, 0]
    last = tmp_path / "last.ckpt"
    assert_same_end(whole(mode, 2) / "last.ckpt", last, counters=not had_ended(saved, last))
    assert turns(whole(mode, 2)) == turns(tmp_path)
    assert_same_chain(whole(mode, 2), tmp_path)


@pytest.mark.long
def test_the_command_tells_once_what_a_signal_to_its_second_process_did(tmp_path: Path, exact_folder: Path) -> None:
    signalling = "{class_path: tests.callbacks.signalling.SignalAt, init_args: {stage: collect, iteration: 2, rank: 1}}"
    saving = f"{{class_path: ModelCheckpoint, init_args: {{dirpath: {tmp_path}, save_on_train_epoch_end: true}}}}"
    (tmp_path / "config.yaml").write_text(config_text(tmp_path, exact_folder, "SharedCritic"))
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", "config.yaml", "--trainer.devices", "2"]
    command += ["--trainer.strategy", "ddp", "--trainer.callbacks", f"[{saving}, {signalling}]"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(next_port()), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 143, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (last,) = [line for line in done.stderr.splitlines() if "everything is saved" in line]
    assert (
        "stopped after iteration 2: SIGTERM received, everything is saved; continue with: agentrl fit --config" in last
    )
    (saved,) = tmp_path.glob("stopped-2.ckpt")
    assert last.endswith(f"--ckpt_path {saved.name}")


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_unless_the_run_was_started_with_nohup(
    tmp_path: Path, exact_folder: Path
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run(tmp_path / "nohup", exact_folder, "windowed", StopOnSignals(), SignalAt("score", 0, name="SIGHUP"))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(Stopped) as error:
            run(tmp_path, exact_folder, "windowed", StopOnSignals(), SignalAt("score", 0, name="SIGHUP"))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert error.value.code == 128 + signal.SIGHUP
    assert len(list(tmp_path.glob("stopped-*.ckpt"))) == 1


@pytest.mark.slow
def test_sigusr1_saves_and_goes_on(tmp_path: Path, exact_folder: Path, whole: Whole) -> None:
    """What it saves is removed like other checkpoints, and takes the place of none."""
    signals = [SignalAt(stage, iteration, name="SIGUSR1") for stage, iteration in (("validate", 2), ("collect", 3))]
    run(tmp_path, exact_folder, "windowed", StopOnSignals(), *signals)
    assert_same_end(whole("windowed") / "last.ckpt", tmp_path / "last.ckpt")
    assert turns(whole("windowed")) == turns(tmp_path)
    assert_same_chain(whole("windowed"), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-*.ckpt")) == ["iteration-00004.ckpt", "saved-3.ckpt"]
    saved = torch.load(tmp_path / "saved-3.ckpt", weights_only=True)["callbacks"]["RunCheckpoints"]["saved"]
    assert [Path(path).name for path in saved] == ["iteration-00003.ckpt", "saved-3.ckpt"]
    last = run(tmp_path / "continued", exact_folder, "windowed", start=tmp_path / "saved-3.ckpt")
    assert_same_end(whole("windowed") / "last.ckpt", last)


@pytest.mark.slow
def test_what_a_stop_has_saved_is_removed_like_other_checkpoints(tmp_path: Path, exact_folder: Path) -> None:
    start = None
    for iteration in (0, 2):
        with pytest.raises(Stopped):
            run(tmp_path, exact_folder, "windowed", StopOnSignals(), SignalAt("score", iteration), start=start)
        start = tmp_path / "last.ckpt"
    run(tmp_path, exact_folder, "windowed", start=start)
    assert sorted(path.name for path in tmp_path.glob("*-*.ckpt")) == ["iteration-00003.ckpt", "iteration-00004.ckpt"]


class NeverAnswers(TransformersEngine):
    """Sends SIGTERM when it is asked a tenth time, and answers no more."""

    async def generate(self, request: Any) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked < 10:
            return await super().generate(request)
        if self.asked == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param("stop", id="in its check"), pytest.param("off", id="in a rollout")])
def test_an_engine_that_never_answers_is_left(tmp_path: Path, exact_folder: Path, check: Any) -> None:
    trainer = make_trainer(tmp_path, 2, [StopOnSignals(), EngineCheck(check)], enable_checkpointing=True)
    data, started = make_data(engine=NeverAnswers()), time.monotonic()
    with pytest.raises(Stopped):
        trainer.fit(make_agent(exact_folder), data)
    assert time.monotonic() - started < 60
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["stopped-0.ckpt"]
    data.teardown("fit")


@pytest.mark.slow
def test_a_check_of_the_engine_is_left_with_the_weights_as_they_were(
    tmp_path: Path, exact_folder: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, generate = 0, TransformersEngine.generate

    async def of_engine(self: TransformersEngine, request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return await generate(self, request)

    with monkeypatch.context() as here:
        here.setattr(TransformersEngine, "generate", of_engine)
        with pytest.raises(Stopped):
            run(tmp_path, exact_folder, "windowed", StopOnSignals(), EngineCheck())
    assert asked <= 16  # not compared to the end
    (saved,) = tmp_path.glob("stopped-0.ckpt")
    assert_same_end(whole("windowed") / "last.ckpt", run(tmp_path, exact_folder, "windowed", start=saved))
    assert turns(whole("windowed")) == turns(tmp_path)


class EngineGoes(L.Callback):
    """In the update of the third iteration."""

    def __init__(self) -> None:
        self.gone = False

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        self.gone = trainer.current_epoch == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["windowed", "ahead"])
def test_a_run_whose_engine_is_gone_is_saved_and_goes_on(
    tmp_path: Path,
    exact_folder: Path,
    whole: Whole,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As if nothing had happened; with rollouts ahead, that which was cut is sampled anew with newer weights."""
    engine_goes, generate = EngineGoes(), TransformersEngine.generate

    async def of_engine(self: TransformersEngine, request: Any) -> Any:
        if engine_goes.gone:
            raise EngineGoneError("no server has been there for 7 s")
        return await generate(self, request)

    with monkeypatch.context() as here:
        here.setattr(TransformersEngine, "generate", of_engine)
        with pytest.raises(Stopped) as error:
            run(tmp_path, exact_folder, mode, StopOnSignals(), engine_goes)
    assert error.value.code == 128 + signal.SIGTERM
    printed = capsys.readouterr().err
    assert "no server has been there for 7 s, everything is saved" in printed
    assert "SIGTERM" not in printed
    (saved,) = tmp_path.glob("stopped-*.ckpt")
    last = run(tmp_path, exact_folder, mode, start=saved)
    if mode == "windowed":
        assert_same_end(whole(mode) / "last.ckpt", last)
        assert turns(whole(mode)) == turns(tmp_path)
    else:
        places = [(turn["iteration"], turn["env"], turn["episode"], turn["turn"]) for turn in turns(tmp_path)]
        assert len(set(places)) == len(places) == len(turns(whole(mode)))
